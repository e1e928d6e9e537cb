"""Where the files of a task come from, and how each kind is read into a tree.

A source is plain data of a task row. Reading one never executes anything of it, touches the host only below `cache`,
and gives a tree under the invariants of `skyenv.envs.swe.trees`. Remote kinds are pinned by a digest.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from anyio import to_thread

from skyenv.envs.swe.fields import mapping
from skyenv.envs.swe.sdists import default_cache, fetch_sdist
from skyenv.envs.swe.trees import (
    MAX_BYTES,
    Tree,
    TreeBuilder,
    TreeFile,
    diff_trees,
    git,
    read_archive,
    read_directory,
    select,
    tree_to_tar,
)
from skyenv.errors import ConfigError, SourceUnavailable

__all__ = [
    "ArchiveSource",
    "DirectorySource",
    "Edit",
    "EditedSource",
    "FilesSource",
    "GitSource",
    "ImageSource",
    "PypiSource",
    "Source",
    "Tree",
    "TreeFile",
    "default_cache",
    "diff_trees",
    "fetch_tree",
    "parse_source",
    "select",
    "tree_to_tar",
]

_log = logging.getLogger(__name__)
_CLONE_SECONDS = 900.0
_CREDENTIALS = re.compile(r"//[^/@\s]*@")


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A directory on this machine, without `.git`, `.venv`, `node_modules` and the caches of tools."""

    path: str


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """A tar or zip on this machine; `strip` leading path components are dropped, `sha256` is checked if given."""

    path: str
    sha256: str | None = None
    strip: int = 0


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A source distribution of a package index, without its top directory; only what is below `subdir`."""

    name: str
    version: str
    sha256: str
    subdir: str = ""


@dataclass(frozen=True, slots=True)
class GitSource:
    """The tree of one commit (a full hash); submodules are left out, no history is kept."""

    url: str
    commit: str


@dataclass(frozen=True, slots=True)
class FilesSource:
    """Files given in full, by relative path."""

    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Edit:
    """In the file `path`, the bytes `old` at offset `at` become `new`."""

    path: str
    at: int
    old: bytes
    new: bytes


@dataclass(frozen=True, slots=True)
class EditedSource:
    """Another source with a few edits, without the files `remove`; so tasks made from packages ship metadata only."""

    base: DirectorySource | ArchiveSource | PypiSource | GitSource
    edits: tuple[Edit, ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageSource:
    """What lies at `path` in the container image of the task's environment; read through a sandbox, not from here."""

    path: str


Source = DirectorySource | ArchiveSource | PypiSource | GitSource | FilesSource | EditedSource | ImageSource


async def fetch_tree(source: Source, *, base: Path, cache: Path) -> Tree:
    """Read the files of `source`; relative paths are below `base`, downloads are kept below `cache`.

    ConfigError when the source is wrong or unsafe, `SourceUnavailable` when it is remote, not cached and out of reach.
    """
    return await to_thread.run_sync(partial(_fetch, source, base, cache), abandon_on_cancel=True)


def _fetch(source: Source, base: Path, cache: Path) -> Tree:
    match source:
        case DirectorySource(path):
            return read_directory(base / path, f"directory {path}")
        case ArchiveSource(path, sha256, strip):
            return read_archive(_read_file(base / path, sha256), f"archive {path}", strip=strip)
        case PypiSource(name, version, sha256, subdir):
            data = fetch_sdist(name, version, sha256, cache)
            return read_archive(data, f"{name} {version}", strip=None, subdir=subdir)
        case GitSource():
            return _read_commit(source, cache)
        case FilesSource(files):
            return _read_files(files)
        case EditedSource():
            return _edit(_fetch(source.base, base, cache), source)
        case ImageSource(path):
            raise ConfigError(f"image: {path} lies in a container image, which only a sandbox can read")


def _edit(tree: Tree, source: EditedSource) -> Tree:
    edited = {path: file for path, file in tree.items() if path not in source.remove}
    if missing := set(source.remove) - set(tree):
        raise ConfigError(f"edited source: remove: {min(missing)!r} is not in the base")
    for edit in sorted(source.edits, key=lambda edit: -edit.at):
        file = edited.get(edit.path)
        end = edit.at + len(edit.old)
        if file is None or stat.S_ISLNK(file.mode) or file.data[edit.at : end] != edit.old:
            raise ConfigError(f"edited source: edits: {edit.path} does not hold {edit.old[:60]!r} at {edit.at}")
        edited[edit.path] = replace(file, data=file.data[: edit.at] + edit.new + file.data[end:])
    return edited


def _read_file(path: Path, sha256: str | None) -> bytes:
    if not path.is_file():
        raise ConfigError(f"archive {path} does not exist; correct `path`")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"archive {path} is larger than {MAX_BYTES} bytes; take a smaller one")
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256:
        raise ConfigError(f"archive {path} has sha256 {found}, expected {sha256}; correct the file or `sha256`")
    return data


def _read_files(files: Mapping[str, bytes]) -> Tree:
    builder = TreeBuilder("files")
    for path, data in files.items():
        builder.claim(path, len(data))
        clean = builder.clean(path)
        if clean != path:
            raise builder.fail(f"{path!r} is not a plain relative path")
        builder.add(path, data, 0o644)
    return builder.build()


def _read_commit(source: GitSource, cache: Path) -> Tree:
    key = hashlib.sha256(f"{source.url}\0{source.commit}".encode()).hexdigest()
    place = cache / "git" / key
    if place.is_dir():
        try:
            return _git_tree(place, source)
        except subprocess.CalledProcessError:
            _log.warning("%s is corrupt; fetching it again", place)
            shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".clone-", dir=place.parent) as scratch:
        clone = Path(scratch) / "clone"
        _clone(source, clone)
        tree = _git_tree(clone, source)
        if not place.exists():
            try:
                clone.rename(place)
            except OSError:
                _log.debug("%s was filled by another process", place)
    return tree


def _clone(source: GitSource, clone: Path) -> None:
    clone.mkdir()
    _log.info("fetching %s of a git repository", source.commit)
    try:
        git(["init", "--quiet", "--bare", "."], clone)
        try:
            _git_fetch(source, clone, ["--depth=1"], source.commit)
        except subprocess.CalledProcessError:
            _git_fetch(source, clone, [], "+refs/*:refs/fetched/*")
        git(["cat-file", "-e", f"{source.commit}^{{commit}}"], clone)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        detail = error.stderr.decode(errors="replace").strip()[-500:] if error.stderr else "it took too long"
        raise SourceUnavailable(
            f"{_name(source)} is not in the cache and cannot be fetched; "
            f"check `url`, `commit` and the network: {_CREDENTIALS.sub('//', detail)}"
        ) from None  # the failed command line holds the address as it is


def _name(source: GitSource) -> str:
    """Name a commit for a message, without a user or token that the address may hold."""
    return f"commit {source.commit} of {_CREDENTIALS.sub('//', source.url)}"


def _git_fetch(source: GitSource, clone: Path, options: list[str], ref: str) -> None:
    command = ["fetch", "--quiet", "--no-tags", "--no-recurse-submodules", *options, "--", source.url, ref]
    git(command, clone, timeout=_CLONE_SECONDS)


def _git_tree(repository: Path, source: GitSource) -> Tree:
    builder = TreeBuilder(_name(source))
    listing = git(["ls-tree", "-r", "-z", "-l", "--full-tree", source.commit], repository)
    entries: list[tuple[str, bytes, str]] = []
    for line in listing.split(b"\0")[:-1]:
        head, _, raw = line.partition(b"\t")
        mode, kind, name, size = head.split()
        path = builder.clean(raw.decode(errors="surrogateescape"))
        if kind == b"blob" and path is not None:
            builder.claim(path, int(size))
            entries.append((path, name, mode.decode()))
    contents = git(["cat-file", "--batch"], repository, b"".join(name + b"\n" for _, name, _ in entries))
    at = 0
    for path, _, mode_text in entries:
        end = contents.index(b"\n", at)
        size_of = int(contents[at:end].split()[2])
        data = contents[end + 1 : end + 1 + size_of]
        at = end + 2 + size_of
        if mode_text == "120000":
            builder.link(path, data.decode(errors="surrogateescape"))
        else:
            builder.add(path, data, int(mode_text, 8))
    return builder.build()


def parse_source(value: object, where: str) -> Source:
    """Read the `source` of a task row; `where` names file, row and field in every ConfigError.

    One key says the kind: `directory: path`, `archive: {path, sha256, strip}`, `pypi: {name, version, sha256, subdir}`,
    `git: {url, commit}`, `files: {path: text}`, `image: path` or
    `edited: {base, edits: [{path, at, old, new}], remove: [path]}`.
    """
    kinds: dict[str, Callable[[object, str], Source]] = {
        "directory": _parse_directory,
        "archive": _parse_archive,
        "pypi": _parse_pypi,
        "git": _parse_git,
        "files": _parse_files,
        "edited": _parse_edited,
        "image": _parse_image,
    }
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in kinds:
        raise ConfigError(f"{where}: must be a mapping with exactly one of the keys {', '.join(kinds)}")
    kind, detail = next(iter(value.items()))
    return kinds[kind](detail, f"{where}.{kind}")


def _parse_directory(value: object, where: str) -> DirectorySource:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: must be the path of a directory")
    return DirectorySource(value)


def _parse_archive(value: object, where: str) -> ArchiveSource:
    fields = mapping(value, where, ("path", "sha256", "strip"), required=("path",))
    strip = fields.get("strip", 0)
    if not isinstance(strip, int) or isinstance(strip, bool) or strip < 0:
        raise ConfigError(f"{where}.strip: must be a number of leading path components, 0 or more")
    sha256 = _matching(fields, "sha256", where, _SHA256) if "sha256" in fields else None
    return ArchiveSource(_matching(fields, "path", where, _TEXT), sha256, strip)


def _parse_pypi(value: object, where: str) -> PypiSource:
    fields = mapping(value, where, ("name", "version", "sha256", "subdir"), required=("name", "version", "sha256"))
    return PypiSource(
        _matching(fields, "name", where, _NAME),
        _matching(fields, "version", where, _VERSION),
        _matching(fields, "sha256", where, _SHA256),
        _matching(fields, "subdir", where, _TEXT) if "subdir" in fields else "",
    )


def _parse_git(value: object, where: str) -> GitSource:
    fields = mapping(value, where, ("url", "commit"), required=("url", "commit"))
    return GitSource(_matching(fields, "url", where, _TEXT), _matching(fields, "commit", where, _COMMIT))


def _parse_files(value: object, where: str) -> FilesSource:
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"{where}: must map relative paths to texts")
    for path, text in value.items():
        if not isinstance(path, str) or not isinstance(text, str):
            raise ConfigError(f"{where}: path {path!r} and its content must be strings; quote them")
    return FilesSource({path: text.encode() for path, text in value.items()})


def _parse_edited(value: object, where: str) -> EditedSource:
    fields = mapping(value, where, ("base", "edits", "remove"), required=("base",))
    base, edits, remove = (
        parse_source(fields["base"], f"{where}.base"),
        fields.get("edits", []),
        fields.get("remove", []),
    )
    if isinstance(base, FilesSource | EditedSource | ImageSource):
        raise ConfigError(f"{where}.base: must be a directory, archive, pypi or git source")
    if not isinstance(edits, list) or not isinstance(remove, list) or not all(isinstance(path, str) for path in remove):
        raise ConfigError(f"{where}: edits must be a list of edits, remove a list of paths")
    return EditedSource(base, tuple(_parse_edit(e, f"{where}.edits[{n}]") for n, e in enumerate(edits)), tuple(remove))


def _parse_edit(value: object, where: str) -> Edit:
    fields = mapping(value, where, ("path", "at", "old", "new"), required=("path", "at", "old", "new"))
    at, old, new = fields["at"], fields["old"], fields["new"]
    if (
        not isinstance(at, int)
        or isinstance(at, bool)
        or at < 0
        or not isinstance(old, str)
        or not isinstance(new, str)
    ):
        raise ConfigError(f"{where}: at must be a byte offset, old and new texts")
    return Edit(_matching(fields, "path", where, _TEXT), at, old.encode(), new.encode())


def _parse_image(value: object, where: str) -> ImageSource:
    if not isinstance(value, str) or not value.startswith("/"):
        raise ConfigError(f"{where}: must be an absolute path in the container image")
    return ImageSource(value)


_TEXT = (re.compile(r"[^-\0][^\0]*"), "a text that does not start with '-'")
_NAME = (re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"), "the name of a project")
_VERSION = (re.compile(r"[A-Za-z0-9.!+_-]+"), "a version, quoted")
_SHA256 = (re.compile(r"[0-9a-f]{64}"), "64 lower-case hexadecimal digits")
_COMMIT = (re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}"), "a full commit hash of 40 or 64 lower-case hexadecimal digits")


def _matching(fields: Mapping[str, Any], name: str, where: str, rule: tuple[re.Pattern[str], str]) -> str:
    value = fields[name]
    if not isinstance(value, str) or not rule[0].fullmatch(value):
        raise ConfigError(f"{where}.{name}: {value!r} is not {rule[1]}")
    return value
