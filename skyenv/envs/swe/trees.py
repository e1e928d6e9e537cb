"""File trees as values: read from archives and directories, packed, compared, cut down.

A tree maps relative POSIX paths to files; empty directories do not exist in it. Invariants of every tree made here: no
absolute path, no `.`, `..`, `.git` or empty component, no file below another file or below a symlink, no symlink that
points out of the tree, modes 0o644 and 0o755 (and `S_IFLNK | 0o777` for a symlink, whose data is its target). Nothing
read is ever executed, and what is read is bounded in members and bytes. All functions block: call them from a thread.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import os
import posixpath
import stat
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyenv.errors import ConfigError

MAX_MEMBERS = 50_000
MAX_BYTES = 512 << 20
SYMLINK = stat.S_IFLNK | 0o777
GIT_SECONDS = 120.0
_IGNORED = {".git", "__pycache__"}
CACHE_NAMES = frozenset(
    {
        "__pycache__",
        ".pytest_cache",
        ".mypy_cache",
        ".ruff_cache",
        ".hypothesis",
        ".tox",
        ".nox",
        ".coverage",
        ".venv",
        "node_modules",
    }
)
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One file: content and mode. For a symlink (`stat.S_ISLNK(mode)`) the data is the target."""

    data: bytes
    mode: int = 0o644


Tree = Mapping[str, TreeFile]


class TreeBuilder:
    """Collects files under the module's invariants; `what` names the origin in every ConfigError."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._files: dict[str, TreeFile] = {}
        self._members_left = MAX_MEMBERS
        self._bytes_left = MAX_BYTES

    def fail(self, reason: str) -> ConfigError:
        """Make the error to raise for `reason`."""
        return ConfigError(f"{self._what}: {reason}")

    def claim(self, path: str, size: int) -> None:
        """Count a member of `size` bytes before it is read. ConfigError over a limit."""
        self._members_left -= 1
        self._bytes_left -= size
        if self._members_left < 0:
            raise self.fail("too many members")
        if self._bytes_left < 0:
            raise self.fail(f"{path!r}: too large, the content exceeds the size limit")

    def clean(self, path: str) -> str | None:
        """Normalise a member's name; None for the root and for what is left out. ConfigError when it is unsafe."""
        if path.startswith("/") or "\\" in path or "\0" in path:
            raise self.fail(f"unsafe path {path!r}")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self.fail(f"unsafe path {path!r}")
        if not parts or any(part.lower() in _IGNORED for part in parts):
            return None
        return "/".join(parts)

    def add(self, path: str, data: bytes, mode: int) -> None:
        """Keep a regular file (any `x` bit makes it 0o755); a later file of the same name wins."""
        self._files[path] = TreeFile(data, 0o755 if mode & 0o111 else 0o644)

    def link(self, path: str, target: str) -> None:
        """Keep a symlink."""
        self._files[path] = TreeFile(os.fsencode(target), SYMLINK)

    def alias(self, path: str, target: str) -> None:
        """Keep a hard link as a copy of the earlier member `target`."""
        if target not in self._files:
            raise self.fail(f"{path!r} links to {target!r}, which does not come before it")
        self.claim(path, len(self._files[target].data))
        self._files[path] = self._files[target]

    def build(self, strip: int = 0, subdir: str = "") -> Tree:
        """Return the tree, without `strip` leading components and below `subdir`. ConfigError when none is left."""
        files: dict[str, TreeFile] = {}
        prefix = subdir.strip("/") + "/" if subdir.strip("/") else ""
        for path, file in self._files.items():
            rest = "/".join(path.split("/")[strip:])
            if rest and rest.startswith(prefix):
                files[rest.removeprefix(prefix)] = file
        if not files:
            raise self.fail("no files below its top" + (f" in {subdir!r}" if subdir else "") + " after stripping")
        for path, file in files.items():
            self._check_place(files, path, file)
        return dict(sorted(files.items()))

    def top(self) -> int:
        """1 when all files share their first directory, as in a source distribution, else 0."""
        return int(all("/" in path for path in self._files) and len({p.split("/")[0] for p in self._files}) == 1)

    def _check_place(self, files: Tree, path: str, file: TreeFile) -> None:
        parent = posixpath.dirname(path)
        while parent:
            if parent in files:
                raise self.fail(f"{path!r} lies below {parent!r}, which is not a directory")
            parent = posixpath.dirname(parent)
        if stat.S_ISLNK(file.mode) and not _stays_inside(path, os.fsdecode(file.data)):
            raise self.fail(f"symlink {path!r} points out of the tree to {os.fsdecode(file.data)!r}")


def _stays_inside(path: str, target: str) -> bool:
    """Whether the symlink at `path` stays in the tree; `..` only leads, for behind another link it means anything."""
    if target.startswith("/") or "\0" in target:
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = len(list(itertools.takewhile(lambda part: part == "..", parts)))
    return bool(parts) and ups <= path.count("/") and ".." not in parts[ups:]


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _Capped(io.RawIOBase):
    """A stream that refuses to give more than `limit` bytes, so that a small archive cannot expand without bound."""

    def __init__(self, stream: _Readable, limit: int) -> None:
        self._stream = stream
        self._left = limit

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("too large, it expands beyond the size limit")
        return data


def read_archive(data: bytes, what: str, *, strip: int | None = 0, subdir: str = "") -> Tree:
    """Read a tar (plain, gz, bz2, xz) or zip. `strip` None drops the single top directory if there is one.

    ConfigError, naming `what`, for unsafe or special members, over the limits and for broken files.
    """
    builder = TreeBuilder(what)
    try:
        if data.startswith(b"PK"):
            _read_zip(data, builder)
        else:
            _read_tar(data, builder)
    except ConfigError:
        raise
    except _BROKEN as error:
        raise builder.fail(f"not a readable archive: {error}") from error
    return builder.build(builder.top() if strip is None else strip, subdir)


def _decompressed(data: bytes) -> _Readable:
    raw = io.BytesIO(data)
    if data.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if data.startswith(b"BZh"):
        return bz2.BZ2File(raw)
    if data.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(raw)
    return raw


def _read_tar(data: bytes, builder: TreeBuilder) -> None:
    stream = _Capped(_decompressed(data), MAX_BYTES + (MAX_MEMBERS << 10))
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            builder.claim(member.name, member.size if member.isreg() else 0)
            path = builder.clean(member.name)
            if member.isdir() or path is None:
                continue
            if member.issym():
                builder.link(path, member.linkname)
            elif member.islnk():
                builder.alias(path, builder.clean(member.linkname) or "")
            elif member.isreg() and (content := archive.extractfile(member)) is not None:
                builder.add(path, content.read(), member.mode)
            else:
                raise builder.fail(f"{member.name!r} is neither file, directory nor link")


def _read_zip(data: bytes, builder: TreeBuilder) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            builder.claim(info.filename, info.file_size)
            path = builder.clean(info.filename)
            if info.is_dir() or path is None:
                continue
            if info.flag_bits & 1:
                raise builder.fail(f"{info.filename!r} is encrypted")
            with archive.open(info) as stream:
                content = _Capped(stream, info.file_size).read()
            mode = info.external_attr >> 16
            if stat.S_ISLNK(mode):
                builder.link(path, os.fsdecode(content))
            elif stat.S_IFMT(mode) in (0, stat.S_IFREG):
                builder.add(path, content, mode)
            else:
                raise builder.fail(f"{info.filename!r} is neither file, directory nor link")


def read_directory(root: Path, what: str) -> Tree:
    """Read the files below `root`, without `.git` and what tools keep beside it; symlinks are kept, not followed."""
    builder = TreeBuilder(what)
    if not root.is_dir():
        raise builder.fail(f"{root} is not a directory; correct the path or create it")
    for file in _walk(root, builder):
        path = builder.clean(file.relative_to(root).as_posix())
        if path is None:
            continue
        info = file.lstat()
        builder.claim(path, info.st_size)
        if stat.S_ISLNK(info.st_mode):
            builder.link(path, str(file.readlink()))
        elif stat.S_ISREG(info.st_mode):
            builder.add(path, file.read_bytes(), info.st_mode)
        else:
            raise builder.fail(f"{path!r} is neither file, directory nor link")
    return builder.build()


def _walk(root: Path, builder: TreeBuilder) -> Iterator[Path]:
    for entry in sorted(os.scandir(root), key=lambda e: e.name):
        if entry.name.lower() in _IGNORED or entry.name in CACHE_NAMES:
            continue
        if entry.is_dir(follow_symlinks=False):
            builder.claim(entry.name, 0)
            yield from _walk(Path(entry.path), builder)
        else:
            yield Path(entry.path)


def tree_to_tar(tree: Tree) -> bytes:
    """Pack `tree`: equal trees give equal bytes, whatever their order; owner, group and times are zero."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(tree):
            file = tree[path]
            member = tarfile.TarInfo(path)
            member.mode = stat.S_IMODE(file.mode)
            if stat.S_ISLNK(file.mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(file.data)
                archive.addfile(member)
            else:
                member.size = len(file.data)
                archive.addfile(member, io.BytesIO(file.data))
    return buffer.getvalue()


def select(tree: Tree, paths: Sequence[str]) -> Tree:
    """Cut `tree` down to the files named in `paths` and those below its directories.

    ConfigError for a path that matches nothing.
    """
    return _cut(paths, tree)[0]


def _cut(paths: Sequence[str], *trees: Tree) -> list[Tree]:
    def match(path: str, wanted: str) -> bool:
        return path == wanted or path.startswith(wanted + "/")

    names = [path.strip("/") for path in paths]
    for name in names:
        if not any(match(path, name) for tree in trees for path in tree):
            raise ConfigError(f"paths: {name!r} matches no file; name a file or a directory of the tree")
    return [{p: f for p, f in tree.items() if any(match(p, n) for n in names)} for tree in trees]


def diff_trees(old: Tree, new: Tree, paths: Sequence[str] | None = None) -> bytes:
    """Return the patch in git's format that makes `new` out of `old`, within `paths` if given; empty when equal.

    Byte-exact: binary files, CRLF, missing final newlines and modes survive `git apply`. Uses the host's git on a
    scratch repository, away from any configuration or attributes. ConfigError for a path in neither tree.
    """
    if paths is not None:
        old, new = _cut(paths, old, new)
    with tempfile.TemporaryDirectory(prefix="skyenv-diff-") as scratch:
        git(["init", "--quiet", "--bare", "."], Path(scratch))
        stream = b"".join([*_commit("refs/heads/old", old), *_commit("refs/heads/new", new)])
        git(["fast-import", "--quiet"], Path(scratch), stream)
        options = ["--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--full-index"]
        return git(["diff-tree", "-r", "-p", *options, "refs/heads/old", "refs/heads/new"], Path(scratch))


def _commit(ref: str, tree: Tree) -> Iterator[bytes]:
    yield b"commit %b\ncommitter - <-> 0 +0000\ndata 0\n" % ref.encode()
    for path, file in sorted(tree.items()):
        mode = b"120000" if stat.S_ISLNK(file.mode) else b"100755" if file.mode & 0o111 else b"100644"
        name = os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
        yield b'M %b inline "%b"\ndata %d\n' % (mode, name, len(file.data))
        yield file.data + b"\n"


def git(arguments: Sequence[str], directory: Path, stdin: bytes = b"", timeout: float = GIT_SECONDS) -> bytes:
    """Run the host's git in `directory` with no configuration but what the environment needs to reach a server.

    Raises `subprocess.CalledProcessError` and `subprocess.TimeoutExpired`; ConfigError when there is no git.
    """
    kept = ("PATH", "HOME", "SSH_AUTH_SOCK", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy")
    environment = {name: value for name in kept if (value := os.environ.get(name) or os.environ.get(name.upper()))}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1"}
    environment |= {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:ssh:git:file", "LC_ALL": "C"}
    if certificates := os.environ.get("SSL_CERT_FILE"):
        environment["GIT_SSL_CAINFO"] = certificates
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, env=environment, input=stdin, capture_output=True,
            check=True, timeout=timeout,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ConfigError("git is not on the PATH; install it") from error
    return done.stdout
