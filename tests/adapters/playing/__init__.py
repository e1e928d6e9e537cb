"""One module a library, run in its environment: plays the shared policy through the adapter, writes what it came to."""
