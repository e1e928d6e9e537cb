"""Messages with headers."""
