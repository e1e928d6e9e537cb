"""Mounts without a place yet: made or cloned as descriptors, attached where they belong later. OSError on failure.

An overlay made this way has any number of layers, where a mount(2) option string ends with a page.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence

from . import kernel

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_CLOEXEC, _CLONE, _FROM_EMPTY_PATH = 1, 1, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_REAL_ROOT = ("redirect_dir=on", "metacopy=off", "index=off")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, what: str, *arguments: int | bytes | None) -> int:
    kinds = [
        ctypes.c_char_p(value) if value is None or isinstance(value, bytes) else ctypes.c_long(value)
        for value in arguments
    ]
    result: int = _libc.syscall(ctypes.c_long(number), *kinds)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def overlay(lowers: Sequence[str], upper: str, work: str, *, user: bool = False) -> int:
    """A writable overlay, topmost lower layer first; the caller closes it. `user`: made without real privileges.

    Volatile where the kernel knows that: nothing of a sandbox is ever synced.
    """
    options = ["userxattr"] if user else list(_REAL_ROOT)
    try:
        return _overlay(lowers, upper, work, [*options, "volatile"])
    except OSError:
        return _overlay(lowers, upper, work, options)


def _overlay(lowers: Sequence[str], upper: str, work: str, options: Sequence[str]) -> int:
    context = _call(_FSOPEN, "fsopen overlay", b"overlay", _CLOEXEC)
    try:
        _configure(context, _SET_STRING, "source", "overlay")
        for option in options:
            key, equals, value = option.partition("=")
            _configure(context, _SET_STRING if equals else _SET_FLAG, key, value if equals else None)
        _set_lowers(context, lowers)
        _configure(context, _SET_STRING, "upperdir", upper)
        _configure(context, _SET_STRING, "workdir", work)
        _configure(context, _CREATE, None, None)
        return _call(_FSMOUNT, "mount overlay", context, _CLOEXEC, kernel.ATTR_NODEV)
    finally:
        os.close(context)


def _set_lowers(context: int, lowers: Sequence[str]) -> None:
    """One by one, or before Linux 6.8 in one string, which must stay shorter than a page."""
    try:
        for lower in lowers:
            _configure(context, _SET_STRING, "lowerdir+", lower)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _configure(context, _SET_STRING, "lowerdir", ":".join(lowers))


def _configure(context: int, command: int, key: str | None, value: str | None) -> None:
    name = key.encode() if key is not None else None
    text = os.fsencode(value) if value is not None else None
    _call(_FSCONFIG, f"mount overlay ({key or 'create'})", context, command, name, text, 0)


def clone(path: str) -> int:
    """A copy of the mount at `path` and of all below it; the caller closes it."""
    return _call(_OPEN_TREE, f"open_tree {path}", _AT_FDCWD, os.fsencode(path), _CLONE | os.O_CLOEXEC | _AT_RECURSIVE)


def attach(tree: int, path: str) -> None:
    """Show a mount at `path` and close its descriptor."""
    try:
        _call(_MOVE_MOUNT, f"move_mount {path}", tree, b"", _AT_FDCWD, os.fsencode(path), _FROM_EMPTY_PATH)
    finally:
        os.close(tree)


def enter(space: int) -> None:
    """Move this process into the mount namespace that a descriptor names; root and directory become that one's."""
    if _libc.setns(space, kernel.NEWNS) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def restack(pid: int, lowers: Sequence[str], upper: str, work: str) -> None:
    """Give the mount namespace of process `pid` another overlay as its root, everything else mounted in it as before.

    Processes whose root it is find themselves in the new one; what has a directory or file of the old one open keeps
    that, so nothing should. This process, which has one thread, visits that namespace and comes back to its own root.
    """
    with contextlib.ExitStack() as stack:
        home, there = (os.open(f"/proc/{who}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC) for who in ("self", pid))
        stack.callback(os.close, home)
        stack.callback(os.close, there)
        points, root = points_below_root(pid), overlay(lowers, upper, work)
        stack.callback(enter, home)
        enter(there)
        _exchange_root(root, points)


def _exchange_root(root: int, points: Sequence[str]) -> None:
    trees = {path: clone(path) for path in points}
    attach(root, points[0])
    try:
        os.chdir(points[0])
        for path in points:
            attach(trees.pop(path), "." + path)
        kernel.pivot_into(".")
    except OSError:
        for tree in trees.values():
            os.close(tree)
        os.chdir("/")
        kernel.unmount(points[0])
        raise


def points_below_root(pid: int) -> list[str]:
    """Where something is mounted on the root of a process's mount namespace itself."""
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        mounts = [line.split() for line in file]
    root = [fields[0] for fields in mounts if fields[4] == b"/"][-1]
    found = [
        os.fsdecode(fields[4].decode("unicode_escape").encode("latin-1")) for fields in mounts if fields[1] == root
    ]
    return list(dict.fromkeys(path for path in found if path != "/"))
