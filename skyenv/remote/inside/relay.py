"""What a held exec runs: standard input and output, connected to the keeper's socket until either ends.

Nothing in the sandbox may look into this process: what passes through it includes the key that makes a node the node.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import NoReturn

from . import kernel
from .keeper import ADDRESS

CHUNK = 1 << 16


def main() -> NoReturn:
    """Entry point. Ends with status 0 when the line ended and 1 when there was nobody to connect to."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.rename_process("skyenv-relay")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(ADDRESS)
    except OSError as error:
        sys.stderr.write(f"nobody keeps this sandbox: {error}\n")
        sys.exit(1)
    threading.Thread(target=_inwards, args=(sock,), daemon=True).start()
    try:
        while data := sock.recv(CHUNK):
            while data:
                data = data[os.write(1, data) :]
    finally:
        os._exit(0)


def _inwards(sock: socket.socket) -> None:
    try:
        while data := os.read(0, CHUNK):
            sock.sendall(data)
    finally:
        os._exit(0)
