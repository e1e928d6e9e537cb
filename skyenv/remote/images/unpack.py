"""One blob in, one overlay layer out: a program of its own (standard library only) that trusts nothing it reads.

Names are resolved inside the layer, links included, so nothing can be written outside. Whiteouts and opaque
directories become what overlayfs understands. Owners are shifted by `base_uid`, or left to the current user when that
is null. Device nodes are left out and counted: a sandbox has a /dev of its own. Of extended attributes only `user.*`
is kept: file capabilities have no effect without new privileges, and overlayfs must not find attributes of its own.

Standard input is one JSON object, standard output another: `{"files", "bytes", "left_out"}` or `{"error", "kind"}`.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import resource
import shutil
import stat
import sys
import tarfile
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .streams import CHUNK, Hashed, Refused, Section, decompressed

LINKS = 40
MEMORY = 1 << 30
USERS = 65536
NOBODY = 65534
UNREADABLE = (
    tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ValueError, ArithmeticError, MemoryError, RecursionError,
)  # fmt: skip
FULL = (errno.ENOSPC, errno.EDQUOT)
ODD = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)
WHITEOUT, OPAQUE, RESERVED = ".wh.", ".wh..wh..opq", ".wh..wh."
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Layer:
    """A layer being built in an empty directory, which nobody else touches."""

    def __init__(self, path: str, base_uid: int | None, max_bytes: int) -> None:
        self.root = os.open(path, DIRECTORY)
        self.base_uid = base_uid
        self.max_bytes = max_bytes
        self.files = self.bytes = self.left_out = 0
        self._namespace = "user" if base_uid is None else "trusted"
        self._directories: dict[tuple[str, ...], tarfile.TarInfo] = {}

    def add(self, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        """Take one member in. Refused for what cannot be meant well."""
        parts = split(member.name)
        if not parts:
            if member.isdir():
                self._directories[()] = member
            return
        name = parts[-1]
        if name.startswith(RESERVED) and name != OPAQUE:
            return
        with self._parent(parts[:-1]) as parent:
            if name == OPAQUE:
                self._make_opaque(parent)
            elif name.startswith(WHITEOUT):
                self._white_out(parent, name.removeprefix(WHITEOUT))
            elif member.isdir():
                self._make_directory(parent, name, member)
                self._directories[parts] = member
            else:
                self._make_file(parent, name, member, tar)

    @contextlib.contextmanager
    def _parent(self, parts: tuple[str, ...]) -> Iterator[int]:
        """The directory `parts` below the root, made where missing; links are followed inside the root only."""
        stack, todo, links = [os.dup(self.root)], deque(parts), 0
        try:
            while todo:
                part = todo.popleft()
                if part == "..":
                    if len(stack) > 1:
                        os.close(stack.pop())
                    continue
                kind = _kind(stack[-1], part)
                if kind == stat.S_IFLNK:
                    links += 1
                    if links > LINKS:
                        raise Refused("hostile", f"too many links in {'/'.join(parts)!r}")
                    target = os.readlink(part, dir_fd=stack[-1])
                    while target.startswith("/") and len(stack) > 1:
                        os.close(stack.pop())
                    todo.extendleft(reversed([each for each in target.split("/") if each not in ("", ".")]))
                    continue
                if kind != stat.S_IFDIR:
                    self._make_directory(stack[-1], part, None)
                stack.append(os.open(part, DIRECTORY, dir_fd=stack[-1]))
            yield stack[-1]
        finally:
            for fd in stack:
                os.close(fd)

    def _make_directory(self, parent: int, name: str, member: tarfile.TarInfo | None) -> None:
        kind = _kind(parent, name)
        if kind != stat.S_IFDIR:
            hides = kind == stat.S_IFCHR
            self._clear(parent, name)
            os.mkdir(name, 0o755, dir_fd=parent)
            if hides:
                self._mark_opaque(parent, name)
        if member is None or kind != stat.S_IFDIR:
            self.files += 1
        self._own(parent, name, member)

    def _make_file(self, parent: int, name: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        if member.ischr() or member.isblk():
            self.left_out += 1
            return
        if member.islnk():
            self._link(parent, name, member)
            return
        self._clear(parent, name)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
        elif member.isfifo():
            os.mkfifo(name, member.mode & 0o7777, dir_fd=parent)
        elif member.isreg() or member.type in (tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE):
            self._write(parent, name, member, tar)
            return
        else:
            self.left_out += 1
            return
        self.files += 1
        self._own(parent, name, member)
        os.utime(name, ns=_times(member), dir_fd=parent, follow_symlinks=False)

    def _write(self, parent: int, name: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        self.files += 1
        self.bytes += member.size
        if self.bytes > self.max_bytes:
            raise Refused("full", f"the layer is larger than {self.max_bytes} bytes")
        source = tar.extractfile(member)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            left = member.size
            while left and source is not None:
                data = source.read(min(left, CHUNK))
                if not data:
                    raise Refused("corrupt", f"the layer ends inside {member.name!r}")
                left -= len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            if self.base_uid is not None:
                os.chown(fd, *self._owner(member))
            os.fchmod(fd, member.mode & 0o7777)
            self._attributes(fd, member)
            os.utime(fd, ns=_times(member))
        finally:
            os.close(fd)

    def _link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        target = split(member.linkname)
        if not target:
            raise Refused("hostile", f"{member.name!r} is a hard link to nothing")
        with self._parent(target[:-1]) as folder:
            if _kind(folder, target[-1]) in (None, stat.S_IFDIR, stat.S_IFCHR):
                raise Refused("hostile", f"{member.name!r} is a hard link to {member.linkname!r}, no file of its layer")
            self._clear(parent, name, keep=(folder, target[-1]))
            with contextlib.suppress(FileExistsError):
                os.link(target[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
        self.files += 1

    def _clear(self, parent: int, name: str, keep: tuple[int, str] | None = None) -> None:
        """Make room for `name`, unless it is the same file as `keep` already."""
        kind = _kind(parent, name)
        if kind is None:
            return
        if keep is not None:
            ours, theirs = (os.stat(n, dir_fd=fd, follow_symlinks=False) for fd, n in ((parent, name), keep))
            if ours.st_ino == theirs.st_ino:
                return
        if kind == stat.S_IFDIR:
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)

    def _white_out(self, parent: int, name: str) -> None:
        """Hide a lower `name`. What this layer itself has there stays, whichever came first."""
        if not name or name in (".", ".."):
            raise Refused("hostile", f"a whiteout of {name!r}")
        kind = _kind(parent, name)
        if kind is None:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=parent)
        elif kind == stat.S_IFDIR:
            self._mark_opaque(parent, name)

    def _make_opaque(self, directory: int) -> None:
        os.setxattr(directory, f"{self._namespace}.overlay.opaque", b"y")

    def _mark_opaque(self, parent: int, name: str) -> None:
        fd = os.open(name, DIRECTORY, dir_fd=parent)
        try:
            self._make_opaque(fd)
        finally:
            os.close(fd)

    def _owner(self, member: tarfile.TarInfo | None) -> tuple[int, int]:
        base = self.base_uid or 0
        uid, gid = (0, 0) if member is None else (member.uid, member.gid)
        return base + (uid if 0 <= uid < USERS else NOBODY), base + (gid if 0 <= gid < USERS else NOBODY)

    def _own(self, parent: int, name: str, member: tarfile.TarInfo | None) -> None:
        if self.base_uid is not None:
            os.chown(name, *self._owner(member), dir_fd=parent, follow_symlinks=False)

    def _attributes(self, fd: int, member: tarfile.TarInfo) -> None:
        for key, value in member.pax_headers.items():
            name = key.removeprefix("SCHILY.xattr.")
            if name != key and name.startswith("user.") and not name.startswith("user.overlay."):
                with contextlib.suppress(OSError):
                    os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))

    def finish(self) -> None:
        """Give directories their modes and times, now that nothing is written into them any more."""
        if self.base_uid is not None:
            os.chown(self.root, *self._owner(self._directories.get(())))
        for parts, member in sorted(self._directories.items(), key=lambda entry: -len(entry[0])):
            with self._parent(parts[:-1]) as parent:
                if parts and _kind(parent, parts[-1]) != stat.S_IFDIR:
                    continue
                fd = os.open(parts[-1], DIRECTORY, dir_fd=parent) if parts else os.dup(self.root)
                try:
                    os.fchmod(fd, member.mode & 0o7777)
                    self._attributes(fd, member)
                    os.utime(fd, ns=_times(member))
                finally:
                    os.close(fd)


def split(name: str) -> tuple[str, ...]:
    """A member's name as parts below the root. Refused when it points above it."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts or "\0" in name:
        raise Refused("hostile", f"the name {name!r} points outside")
    return parts


def _kind(parent: int, name: str) -> int | None:
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    moment = min(max(int(member.mtime * 1_000_000_000), 0), (1 << 62) - 1)
    return moment, moment


def unpack(config: dict[str, Any]) -> dict[str, Any]:
    """Do what the configuration says. Refused, or OSError when this machine cannot."""
    with Path(config["blob"]).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        section: Any = Section(file, config.get("offset", 0), config.get("size", size))
        stream = Hashed(decompressed(section))
        layer = Layer(config["target"], config["base_uid"], config["max_bytes"])
        with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK) as tar:
            for member in tar:
                layer.add(member, tar)
                tar.members = []  # type: ignore[attr-defined]  # a stream of a million files is not remembered
        layer.finish()
        found = stream.finish()
    if config["diff_id"] is not None and found != config["diff_id"]:
        raise Refused("corrupt", f"the layer's content is {found}, not {config['diff_id']}")
    return {"files": layer.files, "bytes": layer.bytes, "left_out": layer.left_out, "diff_id": found}


def pack(config: dict[str, Any]) -> dict[str, Any]:
    """Write a directory as a tar file, in a stable order and without what is mounted in it."""
    top = config["source"]
    device = Path(top).lstat().st_dev

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uname = member.gname = ""
        return member if Path(top, member.name).lstat().st_dev == device else None

    with tarfile.open(config["blob"], "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(top, ".", filter=keep)
    return {}


def main() -> None:
    """Entry point."""
    config = json.load(sys.stdin)
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    if config["run_as"] is not None:
        os.setgroups([])
        os.setresgid(*[config["run_as"]] * 3)
        os.setresuid(*[config["run_as"]] * 3)
    try:
        answer = pack(config) if "source" in config else unpack(config)
    except Refused as error:
        answer = {"error": str(error), "kind": error.kind}
    except UNREADABLE as error:
        answer = {"error": f"the layer cannot be read: {error!r}", "kind": "corrupt"}
    except OSError as error:
        kind = "full" if error.errno in FULL else "hostile" if error.errno in ODD else "machine"
        answer = {"error": str(error), "kind": kind}
    sys.stdout.write(json.dumps(answer))
