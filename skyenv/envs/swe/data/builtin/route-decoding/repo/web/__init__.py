"""Paths to pages and back."""
