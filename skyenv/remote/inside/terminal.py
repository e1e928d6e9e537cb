"""A command on a pseudo-terminal: a shell of its own, which leads a session whose controlling terminal it is.

It starts where the session shell is, with the variables that one exports; what it changes itself ends with it. The
terminal echoes, edits lines and turns C-c into SIGINT as usual, and what is left on it is hung up when its shell ends;
only output newlines are left as they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Mapping, Sequence

from . import processes

ROWS, COLUMNS = 24, 80


def open_pair() -> tuple[int, int]:
    """Master (not blocking) and slave of a new terminal. OSError when there is none to be had."""
    master, slave = os.openpty()
    try:
        settings = termios.tcgetattr(slave)
        settings[1] &= ~termios.ONLCR
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.set_blocking(master, False)
    except (OSError, termios.error) as error:
        os.close(master)
        os.close(slave)
        raise OSError(f"no terminal: {error}") from error
    return master, slave


def start(slave: int, arguments: Sequence[str], environment: Mapping[str, str], folders: Sequence[str]) -> int:
    """Fork a process that leads a session on the terminal; the first folder that exists is where it starts."""
    pid = os.fork()
    if not pid:
        _become(slave, arguments, environment, folders)
    return pid


def _become(slave: int, arguments: Sequence[str], environment: Mapping[str, str], folders: Sequence[str]) -> None:
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for target in (0, 1, 2):
            os.dup2(slave, target)
        os.closerange(3, 1 << 16)
        processes.become(arguments, environment, folders, (*processes.SIGNALS, signal.SIGHUP, signal.SIGQUIT))
    finally:
        os._exit(127)


def write(master: int, data: bytes) -> int:
    """Type text; returns how many bytes the terminal took, fewer when its program does not read."""
    done = 0
    with contextlib.suppress(BlockingIOError):
        while done < len(data):
            done += os.write(master, data[done : done + 256])
    return done
