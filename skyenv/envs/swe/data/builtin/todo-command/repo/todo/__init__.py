"""A list of things to do."""
