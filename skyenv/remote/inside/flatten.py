"""Several layers of an overlay made into one that shows the same, whatever lies below them.

Layers are read as the kernel reads them: a character device 0:0 hides a name (whiteout), `trusted.overlay.opaque` on a
directory hides what lies below it, and `trusted.overlay.redirect` says under which name, or absolute path, it is
continued in the layers below. Files become hard links, so that the cost depends on their number and not their size; the
layers themselves are only read. Without metacopy and data-only layers, which no sandbox has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from typing import NamedTuple

PREFIX = "trusted.overlay."


class Part(NamedTuple):
    """A directory of one layer that a directory of the view is made of."""

    layer: int
    path: str


class Folder(NamedTuple):
    """A directory of the view: its parts, top first, where it goes, and whether what lies below shows through it."""

    parts: tuple[Part, ...]
    target: str
    open_below: bool


class _Search:
    """The search for one name down the layers; `name` changes with every redirect, absolute ones start with '/'."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stop = self.is_folder = False
        self.parts: list[Part] = []


def flatten(layers: Sequence[str], target: str) -> None:
    """Write the missing directory `target` to show what `layers`, topmost first, show together. OSError on failure."""
    root = tuple(Part(number, path) for number, path in enumerate(layers))
    os.mkdir(target)
    todo, made = [Folder(root, target, True)], []
    while todo:
        folder = todo.pop()
        made.append(folder)
        for name in sorted({name for part in folder.parts for name in os.listdir(part.path)}):
            found = _search(folder.parts, name, root)
            inner = _write(folder, found, f"{folder.target}/{name}", name)
            if inner is not None:
                todo.append(inner)
    for folder in reversed(made):
        _copy_attributes(folder.parts[0].path, folder.target)


def _write(folder: Folder, found: _Search, target: str, name: str) -> Folder | None:
    """Write one name; a directory is returned for its contents to be written."""
    if not found.parts:
        if folder.open_below:
            os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(0, 0))
        return None
    if not found.is_folder:
        _link(found.parts[0].path, target)
        return None
    os.mkdir(target)
    absolute = found.name.startswith("/")
    below = not found.stop and (absolute or folder.open_below)
    if below and found.name != name:
        os.setxattr(target, f"{PREFIX}redirect", os.fsencode(found.name))
    elif not below and folder.open_below:
        os.setxattr(target, f"{PREFIX}opaque", b"y")
    return Folder(tuple(found.parts), target, below)


def _search(parts: Sequence[Part], name: str, root: Sequence[Part]) -> _Search:
    """Look `name` up in a directory made of `parts`, as the kernel's `ovl_lookup` does."""
    search, number = _Search(name), 0
    while not search.stop and number < len(parts):
        part = parts[number]
        path = _in_layer(part.path, search)
        number += 1
        if path is None:
            continue
        search.parts.append(Part(part.layer, path))
        if search.name.startswith("/") and parts is not root:
            parts, number = root, part.layer + 1
    return search


def _in_layer(base: str, search: _Search) -> str | None:
    """What one layer has; an absolute name is walked from the top of the layer, element by element."""
    if not search.name.startswith("/"):
        return _single(base, search, search.name, 0, "")
    rest, path = len(search.name) - 1, base
    while True:
        # Counted from the end, since a redirect on the way changes what comes before.
        start = len(search.name) - rest
        end = search.name.find("/", start)
        end = len(search.name) if end < 0 else end
        element, after = search.name[start:end], search.name[end:]
        found = _single(path, search, element, start, after)
        if found is None or not after:
            return found
        path, rest = found, rest - len(element) - 1


def _single(base: str, search: _Search, element: str, start: int, after: str) -> str | None:
    """One element of a name in one directory of one layer; `start` and `after` are what surrounds it in the name."""
    path = f"{base}/{element}"
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
        search.stop = True
        return None
    if not stat.S_ISDIR(found.st_mode):
        search.stop = True
        return None if search.is_folder or after else path
    if not after:
        search.is_folder = True
    if _attribute(path, "opaque") == "y":
        search.stop = True
        return path
    redirect = _attribute(path, "redirect")
    if redirect.startswith("/"):
        search.stop, search.name = False, redirect + after
    elif redirect:
        search.name = search.name[:start] + redirect + after
    return path


def _attribute(path: str, name: str) -> str:
    try:
        return os.fsdecode(os.getxattr(path, PREFIX + name, follow_symlinks=False))
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise
        return ""


def _link(source: str, target: str) -> None:
    """The same file under another name, or a copy of one that has too many names."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EMLINK:
            raise
        shutil.copyfile(source, target, follow_symlinks=False)
        _copy_attributes(source, target)


def _copy_attributes(source: str, target: str) -> None:
    found = os.lstat(source)
    os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)
    os.chmod(target, stat.S_IMODE(found.st_mode))
    with contextlib.suppress(OSError):
        for name in os.listxattr(source, follow_symlinks=False):
            if not name.startswith(PREFIX):
                os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
