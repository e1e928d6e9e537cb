"""The file system of a container as a stream, and back: what changed since it started, and the names of all the rest.

A snapshot is a tar: an index of every path first, then whatever was changed or made since the container started (its
change time tells; nobody inside can set that back), then an end mark. It is exact on top of the image that it was
taken from: restoring removes what the index does not name and replaces what the tar holds. Mounted directories and
files are not part of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import tarfile
from collections.abc import Iterator
from typing import IO, Any

INDEX, END = ".skyenv/index", ".skyenv/end"
MOMENT, XATTR = "SKYENV.mtime_ns", "SCHILY.xattr."
SLACK = 1.0


def mounted() -> set[str]:
    """Every mount point but the root."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    return {point.encode().decode("unicode_escape") if "\\" in point else point for point in points} - {"/"}


def walk(top: str, skipped: set[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Every path below `top`, parents first, that is no mount point."""
    pending = [top]
    while pending:
        folder = pending.pop()
        try:
            names = sorted(os.listdir(folder))
        except NotADirectoryError:
            continue
        for name in names:
            path = f"{folder.rstrip('/')}/{name}"
            if path in skipped:
                continue
            info = os.lstat(path)
            yield path, info
            if stat.S_ISDIR(info.st_mode):
                pending.append(path)


def capture(out: IO[bytes], since: float, root: str = "/") -> None:
    """Write the tar. OSError when a file cannot be read."""
    entries = [entry for entry in walk(root, mounted()) if not stat.S_ISSOCK(entry[1].st_mode)]
    start = len(root.rstrip("/")) + 1
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, errorlevel=2) as tar:
        index = b"\0".join(os.fsencode(path[start:]) for path, _info in entries)
        _add_bytes(tar, INDEX, index)
        for path, info in entries:
            if info.st_ctime >= since - SLACK:
                _add(tar, path, path[start:])
        _add_bytes(tar, END, b"")


def _add(tar: tarfile.TarFile, path: str, name: str) -> None:
    member = tar.gettarinfo(path, name)
    member.pax_headers = {MOMENT: str(os.lstat(path).st_mtime_ns)}
    for attribute in os.listxattr(path, follow_symlinks=False):
        if attribute.startswith("user."):
            value = os.getxattr(path, attribute, follow_symlinks=False)
            member.pax_headers[XATTR + attribute] = value.decode("utf-8", "surrogateescape")
    if member.isreg():
        with open(path, "rb") as file:
            tar.addfile(member, file)
    else:
        tar.addfile(member)


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def restore(source: IO[bytes], root: str = "/") -> None:
    """Make the file system what the tar says. OSError when it is cut short or does not fit this image."""
    folders: list[tuple[str, tarfile.TarInfo]] = []
    unchanged: set[str] = set()
    complete = False
    try:
        with tarfile.open(fileobj=source, mode="r|", errorlevel=2) as tar:
            for member in tar:
                if member.name == INDEX:
                    unchanged = _keep_only(root, _content(tar, member).read())
                elif member.name == END:
                    complete = True
                else:
                    path = f"{root.rstrip('/')}/{member.name}"
                    unchanged.discard(path)
                    _put(tar, member, path, root)
                    if member.isdir():
                        folders.append((path, member))
    except tarfile.TarError as error:
        raise OSError(f"the snapshot cannot be read: {error}") from error
    if not complete:
        raise OSError("the snapshot ends early")
    for path, member in reversed(folders):
        _dress(path, member)
    missing = next((path for path in sorted(unchanged) if not os.path.lexists(path)), None)
    if missing is not None:
        raise OSError(f"{missing} is neither in the image nor in the snapshot")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    if file is None:
        raise OSError(f"{member.name} has no content")
    return file


def _keep_only(root: str, index: bytes) -> set[str]:
    """Remove what the index does not name; returns the paths that it does."""
    kept = {f"{root.rstrip('/')}/{os.fsdecode(name)}" for name in index.split(b"\0") if name}
    for path, info in reversed(list(walk(root, mounted()))):
        if path not in kept:
            if stat.S_ISDIR(info.st_mode):
                with contextlib.suppress(OSError):  # something is mounted in it
                    os.rmdir(path)
            else:
                os.unlink(path)
    return kept


def _put(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, root: str) -> None:
    there = os.lstat(path).st_mode if os.path.lexists(path) else None
    if member.isdir():
        if there is not None and not stat.S_ISDIR(there):
            os.unlink(path)
            there = None
        if there is None:
            os.mkdir(path, 0o700)
        return
    if there is not None:
        if stat.S_ISDIR(there):
            _remove_tree(path)
        else:
            os.unlink(path)
    if member.isreg():
        _write(_content(tar, member), path)
    elif member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        os.link(f"{root.rstrip('/')}/{member.linkname}", path, follow_symlinks=False)
        return
    elif member.isfifo():
        os.mkfifo(path)
    else:
        raise OSError(f"{path}: a device cannot be restored")
    _dress(path, member)


def _write(source: IO[bytes], path: str) -> None:
    with open(path, "xb") as file:
        while data := source.read(1 << 20):
            file.write(data)


def _dress(path: str, member: tarfile.TarInfo) -> None:
    """Owner, mode, extended attributes and times, in the order in which they survive each other."""
    os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        os.chmod(path, member.mode)
        for key, value in member.pax_headers.items():
            if key.startswith(XATTR):
                os.setxattr(path, key.removeprefix(XATTR), value.encode("utf-8", "surrogateescape"))
    moment = int(member.pax_headers[MOMENT])
    os.utime(path, ns=(moment, moment), follow_symlinks=False)


def _remove_tree(path: str) -> None:
    entries: list[tuple[str, Any]] = list(walk(path, set()))
    for each, info in reversed(entries):
        (os.rmdir if stat.S_ISDIR(info.st_mode) else os.unlink)(each)
    os.rmdir(path)


def main() -> None:
    """Entry point: `capture SINCE` to standard output or `restore SINCE` from standard input; "ok" or why not on
    standard error.
    """
    verb, since = sys.argv[1], float(sys.argv[2])
    report = os.dup(2)
    try:
        if verb == "capture":
            with os.fdopen(1, "wb", buffering=1 << 16, closefd=False) as out:
                capture(out, since)
        else:
            with os.fdopen(0, "rb", closefd=False) as source:
                restore(source)
        os.write(report, b"ok")
    except OSError as error:
        os.write(report, str(error).encode(errors="replace")[:4000])
