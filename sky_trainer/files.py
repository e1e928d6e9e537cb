"""Files that a crash never leaves half written: they appear whole, under their name, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


def partial_of(path: Path) -> Path:
    """The place beside `path` for what is to become it."""
    return path.with_name(f"{path.name}{PARTIAL}")


def remove(path: Path) -> None:
    """Remove what an earlier crash left, if anything: a directory or a file."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def publish(partial: Path, path: Path) -> None:
    """Make what is complete appear as `path`. A crash may leave the old one or none, never a mixture."""
    if path.is_dir():
        old = path.with_name(f"{path.name}.old{PARTIAL}")
        shutil.rmtree(old, ignore_errors=True)
        path.replace(old)
        partial.replace(path)
        shutil.rmtree(old)
    else:
        partial.replace(path)


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` once the block ends well; else it is removed. For one process."""
    partial = partial_of(path)
    remove(partial)
    try:
        yield partial
        publish(partial, path)
    finally:
        remove(partial)


def write_text(path: Path, text: str) -> None:
    """Replace a file by this text."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add one JSON object as a line, in one write; a line cut short by an earlier crash is closed first."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(_line(row).encode())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, in order; a line cut short by a crash is left out, a missing file is empty."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def keep_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these lines."""
    write_text(path, "".join(map(_line, rows)))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"
