"""One file a command: its options, and how it calls the library."""
