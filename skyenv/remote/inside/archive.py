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

# Where this runs, nothing can be imported later: the file system is then the sandbox's.
with contextlib.suppress(ImportError):
    import bz2  # noqa: F401
    import lzma  # noqa: F401
    import zlib  # noqa: F401


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
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        packer = _Packer(tar, frozenset(exclude))
        if os.path.isdir(path):
            packer.add_folder(path, "")
        else:
            packer.add(os.path.realpath(path), os.path.basename(path))


class _Packer:
    """Writes members without asking who their owners are: user databases name libraries that would be loaded here."""

    def __init__(self, tar: tarfile.TarFile, skipped: frozenset[str]) -> None:
        self.tar = tar
        self.skipped = skipped
        self.known: dict[tuple[int, int], str] = {}

    def add_folder(self, folder: str, prefix: str) -> None:
        """Everything in a folder, sorted by bytes."""
        for name in sorted(os.listdir(folder), key=os.fsencode):
            if name in self.skipped:
                continue
            path, inside = f"{folder}/{name}", prefix + name
            with contextlib.suppress(FileNotFoundError):
                self.add(path, inside)
                if os.path.isdir(path) and not os.path.islink(path):
                    self.add_folder(path, inside + "/")

    def add(self, path: str, inside: str) -> None:
        """A file, directory or link; others are left out."""
        found = os.lstat(path)
        member = tarfile.TarInfo(inside)
        member.mode, member.mtime = stat.S_IMODE(found.st_mode), found.st_mtime
        if stat.S_ISDIR(found.st_mode):
            member.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(found.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        elif not stat.S_ISREG(found.st_mode):
            return
        elif (first := self._first_name(found, inside)) is not None:
            member.type, member.linkname = tarfile.LNKTYPE, first
        else:
            member.size = found.st_size
            with open(path, "rb") as file:
                self.tar.addfile(member, file)
            return
        self.tar.addfile(member)

    def _first_name(self, found: os.stat_result, inside: str) -> str | None:
        """Under which other name this file is in the archive already."""
        first = self.known.setdefault((found.st_dev, found.st_ino), inside) if found.st_nlink > 1 else inside
        return None if first == inside else first


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
