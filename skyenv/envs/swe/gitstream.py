"""Changes as a stream for `git fast-import`: content with its length, names quoted, nothing left to interpret."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from skyenv.envs.swe.policy import Change
from skyenv.envs.swe.sources import TreeFile


def two_commits(changes: Iterable[Change]) -> bytes:
    """Return a stream of two branches, `old` and `new`, that hold the changed files alone, before and after."""
    changed = list(changes)
    old = ((change.path, change.old) for change in changed)
    new = ((change.path, change.new) for change in changed)
    return b"".join([*_commit(b"old", old), *_commit(b"new", new)])


def _commit(branch: bytes, files: Iterable[tuple[str, TreeFile | None]]) -> Iterator[bytes]:
    yield b"commit refs/heads/%b\ncommitter - <-> 0 +0000\ndata 0\n" % branch
    for path, file in files:
        if file is None:
            continue
        mode = b"120000" if stat.S_ISLNK(file.mode) else b"100755" if file.mode & 0o111 else b"100644"
        yield b'M %b inline "%b"\ndata %d\n%b\n' % (mode, _quoted(path), len(file.data), file.data)


def _quoted(path: str) -> bytes:
    """Quote a name as git does, every byte outside plain ASCII in octal."""
    plain = bytes(range(0x20, 0x7F)).replace(b'"', b"").replace(b"\\", b"")
    return b"".join(bytes([byte]) if byte in plain else b"\\%03o" % byte for byte in os.fsencode(path))
