"""What the commands print."""

from __future__ import annotations

import logging
import sys


def print_line(text: str) -> None:
    """Print for the user at once, so that progress shows in a pipe too."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_error(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"skyenv: {text}\n")


def log_to_stderr() -> None:
    """Show what a server logs, from INFO on."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
