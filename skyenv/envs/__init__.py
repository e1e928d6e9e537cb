"""Environments; each subpackage is one family."""
