"""File operations, done inside the sandbox's own root so that symlinks cannot lead out of it.

Paths are absolute strings (undecodable bytes as surrogates). Only regular files are opened: a FIFO, device or socket
is refused before it could block. Everything raises OSError with `errno`; `Conflict` is a compare-and-swap that lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Any

INLINE = 1 << 20
CHUNK = 1 << 18
MAX_ENTRIES = 100_000


class Conflict(OSError):
    """The file holds other bytes than the writer expected."""


class Cut(OSError):
    """The node went away while it fed data in: nobody's fault inside, and no answer to keep."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EIO, "the node went away before all of the data had come", path)


def checked(path: str) -> str:
    """`path` if it can name something: absolute and without NUL."""
    if not path.startswith("/") or "\0" in path:
        raise OSError(errno.EINVAL, "the path must be absolute and without NUL bytes", path)
    return path


def describe(path: str, found: os.stat_result) -> list[Any]:
    """A FileInfo as a list: path, kind, size, mode."""
    mode = found.st_mode
    if stat.S_ISREG(mode):
        kind = "file"
    elif stat.S_ISDIR(mode):
        kind = "dir"
    else:
        kind = "link" if stat.S_ISLNK(mode) else "other"
    return [path, kind, found.st_size, stat.S_IMODE(mode)]


def status(path: str) -> list[Any]:
    """What `path` resolves to."""
    return describe(path, os.stat(checked(path)))


def open_regular(path: str) -> int:
    """A descriptor of the regular file that `path` resolves to, for reading."""
    _refuse_special(os.stat(checked(path)), path)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_special(os.fstat(file), path)
    except OSError:
        os.close(file)
        raise
    return file


def check_regular(path: str) -> None:
    """OSError unless `open_regular` would succeed."""
    os.close(open_regular(path))


def _refuse_special(found: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def read_into(path: str, offset: int, max_bytes: int | None, write: Callable[[bytes], Any]) -> None:
    """Hand at most `max_bytes` from `offset` on to `write`, in chunks."""
    file = open_regular(path)
    try:
        left = max_bytes
        while left is None or left > 0:
            chunk = os.pread(file, CHUNK if left is None else min(CHUNK, left), offset)
            if not chunk:
                break
            write(chunk)
            offset += len(chunk)
            left = None if left is None else left - len(chunk)
    finally:
        os.close(file)


def is_small(path: str, max_bytes: int | None) -> bool:
    """Whether reading it inline holds nobody up."""
    size = os.stat(checked(path)).st_size
    return min(size, size if max_bytes is None else max_bytes) <= INLINE


def write_file(path: str, data: bytes, expected: bytes | None) -> None:
    """Replace the file's content atomically; parents are created, mode and owner of an existing file kept."""
    target = os.path.realpath(checked(path))
    old = None
    with contextlib.suppress(FileNotFoundError):
        old = os.stat(target)
        _refuse_special(old, path)
    if expected is not None:
        _compare(target, expected, exists=old is not None)
    folder, name = os.path.split(target)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    os.makedirs(folder, exist_ok=True)
    temporary = f"{folder}/.skyenv-{os.getpid()}-{os.urandom(6).hex()}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(file, data)
            if old is None:
                os.fchmod(file, 0o644)
            else:
                os.fchown(file, old.st_uid, old.st_gid)
                os.fchmod(file, stat.S_IMODE(old.st_mode))
        finally:
            os.close(file)
        os.rename(temporary, target)
    except OSError:
        os.unlink(temporary)
        raise


def _compare(target: str, expected: bytes, *, exists: bool) -> None:
    held = bytearray()
    if exists:
        read_into(target, 0, len(expected) + 1, held.extend)
    if not exists or held != expected:
        raise Conflict(errno.EBUSY, "the file changed since it was read", target)


def write_all(file: int, data: bytes) -> None:
    """Write everything, however often the kernel takes only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def list_dir(path: str, depth: int) -> list[list[Any]]:
    """Entries below `path` down to `depth`, sorted by their bytes; symlinks are listed, not followed."""
    found: list[list[Any]] = []
    base = checked(path).rstrip("/")
    todo = [(base or "/", depth)]
    while todo:
        folder, levels = todo.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                full = f"{folder.rstrip('/')}/{entry.name}"
                with contextlib.suppress(FileNotFoundError):
                    found.append(describe(full, entry.stat(follow_symlinks=False)))
                    if levels > 1 and entry.is_dir(follow_symlinks=False):
                        todo.append((full, levels - 1))
        if len(found) > MAX_ENTRIES:
            raise OSError(errno.EOVERFLOW, f"more than {MAX_ENTRIES} entries", path)
    found.sort(key=lambda entry: os.fsencode(entry[0]))
    return found


def remove(path: str) -> None:
    """Delete a regular file or a symlink."""
    found = os.lstat(checked(path))
    if not stat.S_ISLNK(found.st_mode):
        _refuse_special(found, path)
    os.unlink(path)
