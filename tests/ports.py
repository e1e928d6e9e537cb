"""Ports for servers that are named before they listen, or away for a while."""

from __future__ import annotations

import secrets
import socket


def free_port() -> int:
    """One that nobody listens on, below those that the kernel gives out: only another caller of this could take it."""
    while True:
        port = 12_000 + secrets.randbelow(18_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
