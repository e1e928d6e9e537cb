"""Sandboxes, near or far: one node server, one client, one wire protocol between them."""
