"""What commands print: lines for people, and with `--json` one object as the last line of stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_line(text: str) -> None:
    """Print for the user at once, so that progress shows in a pipe too."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own."""
    print_line(json.dumps(value))


def print_error(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"sky_trainer: {' '.join(text.split())}\n")


def make_console() -> Console:
    """The console for progress, on stdout."""
    from rich.console import Console

    return Console(file=sys.stdout)
