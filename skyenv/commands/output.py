"""What the commands print."""

from __future__ import annotations

import sys


def print_line(text: str) -> None:
    """Print for the user at once, so that progress shows in a pipe too."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_error(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"skyenv: {text}\n")
