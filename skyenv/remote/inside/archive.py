"""Trees as tar streams. Hostile archives come in here: nothing lands outside the folder it is unpacked into.

Only files, directories, symlinks and hard links travel; owners do not (everything belongs to the sandbox's root).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
from collections.abc import Collection
from typing import IO


class Counted(io.BufferedReader):
    """A descriptor to read from, which stays open, and how much was read."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(io.FileIO(descriptor, closefd=False))
        self.count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """See `io.BufferedReader.read`."""
        data = super().read(size)
        self.count += len(data)
        return data


def pack(path: str, exclude: Collection[str], out: IO[bytes]) -> None:
    """Write the tree below `path` (or the one file) to `out`, entries in a fixed order."""
    os.stat(path)
    skipped = frozenset(exclude)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        if os.path.isdir(path):
            _pack_folder(tar, path, "", skipped)
        else:
            _add(tar, os.path.realpath(path), os.path.basename(path))


def _pack_folder(tar: tarfile.TarFile, folder: str, prefix: str, skipped: frozenset[str]) -> None:
    for name in sorted(os.listdir(folder), key=os.fsencode):
        if name in skipped:
            continue
        path, inside = f"{folder}/{name}", prefix + name
        with contextlib.suppress(FileNotFoundError):
            _add(tar, path, inside)
            if os.path.isdir(path) and not os.path.islink(path):
                _pack_folder(tar, path, inside + "/", skipped)


def _add(tar: tarfile.TarFile, path: str, inside: str) -> None:
    mode = os.lstat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        return
    member = tar.gettarinfo(path, inside)
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isreg():
        with open(path, "rb") as file:
            tar.addfile(member, file)
    else:
        tar.addfile(member)


def unpack(path: str, source: IO[bytes]) -> None:
    """Unpack a tar stream below `path`, which is created if missing; existing files are replaced.

    A member that would land outside, or that is a device or FIFO, raises OSError; what came before it stays.
    """
    os.makedirs(path, exist_ok=True)
    top = os.path.realpath(path)
    folders: list[tuple[str, tarfile.TarInfo]] = []
    try:
        with tarfile.open(fileobj=source, mode="r|*") as tar:
            for member in tar:
                target = _target(top, member.name)
                if member.isdir():
                    os.makedirs(target, exist_ok=True)
                    folders.append((target, member))
                else:
                    _unpack_one(tar, member, target, top)
        while source.read(1 << 16):
            pass
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise OSError(errno.EINVAL, f"not a readable tar archive: {error}", path) from error
    for target, member in reversed(folders):
        os.chmod(target, member.mode & 0o1777)
        os.utime(target, (member.mtime, member.mtime))


def _target(top: str, name: str) -> str:
    """Where a member lands; OSError when that is not below `top`."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise OSError(errno.EPERM, "the member would land outside", name)
    target = os.path.normpath(f"{top}/{name}")
    folder = target if target == top else os.path.dirname(target)
    _stay_below(os.path.realpath(folder), top, name)
    if target != top and os.path.islink(target):
        os.unlink(target)
    return target


def _stay_below(path: str, top: str, name: str) -> None:
    if path != top and not path.startswith(top.rstrip("/") + "/"):
        raise OSError(errno.EPERM, "the member would land outside", name)


def _unpack_one(tar: tarfile.TarFile, member: tarfile.TarInfo, target: str, top: str) -> None:
    if not (member.isreg() or member.issym() or member.islnk()):
        raise OSError(errno.EPERM, "only files, directories and links are unpacked", member.name)
    if target == top:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), member.name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if member.islnk():
        _link(_target(top, member.linkname), target, top)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    if member.issym():
        os.symlink(member.linkname, target)
        return
    data = tar.extractfile(member)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, 0o600), "wb") as file:
        while data is not None and (chunk := data.read(1 << 18)):
            file.write(chunk)
        os.fchmod(file.fileno(), member.mode & 0o1777)
    os.utime(target, (member.mtime, member.mtime))


def _link(source: str, target: str, top: str) -> None:
    """A hard link within the tree."""
    if source == target:
        return
    _stay_below(os.path.realpath(source), top, source)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    os.link(source, target, follow_symlinks=False)
