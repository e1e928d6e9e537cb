"""Layers of an overlay: one made of several shows what they showed together, on the kernel's own overlay."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv.remote.inside import flatten, kernel, mounts

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), PATHS, st.integers(0, 9).map(str)),
    st.tuples(st.just("mkdir"), PATHS, st.just("")),
    st.tuples(st.just("remove"), PATHS, st.just("")),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("link"), PATHS, PATHS),
    st.tuples(st.just("symlink"), PATHS, PATHS),
    st.tuples(st.just("chmod"), PATHS, st.sampled_from(["700", "711", "640"])),
    st.tuples(st.just("xattr"), PATHS, NAMES),
)
Operation = tuple[str, str, str]


@pytest.fixture(autouse=True)
def _own_mounts() -> Iterator[None]:
    """Mounts of this test are seen by nobody else, and go with it."""
    home = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    kernel.leave_mount_namespace()
    yield
    mounts.enter(home)
    os.close(home)


@contextmanager
def overlay(lowers: list[Path], scratch: Path) -> Iterator[Path]:
    """A writable overlay with an upper directory of its own, `scratch/upper`."""
    for name in ("upper", "work", "view"):
        (scratch / name).mkdir(parents=True)
    mounts.attach(
        mounts.overlay([str(each) for each in lowers], f"{scratch}/upper", f"{scratch}/work"), f"{scratch}/view"
    )
    try:
        yield scratch / "view"
    finally:
        kernel.unmount(f"{scratch}/view")


def apply(root: Path, operation: Operation) -> None:
    """One change; what the file system refuses changes nothing."""
    kind, path, value = operation
    target = root / path
    try:
        if kind == "write":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(value)
        elif kind == "mkdir":
            target.mkdir(parents=True)
        elif kind == "remove":
            shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
        elif kind == "rename":
            target.rename(root / value)
        elif kind == "link":
            os.link(target, root / value, follow_symlinks=False)
        elif kind == "symlink":
            (root / value).symlink_to(path)
        elif kind == "chmod":
            if not target.is_symlink():
                target.chmod(int(value, 8))
        else:
            os.setxattr(target, "user.note", value.encode(), follow_symlinks=False)
    except OSError:
        pass


def listing(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below `root` that a program can see, but inode numbers, link counts and directory sizes."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            content: object = None
            if stat.S_ISREG(info.st_mode):
                content = Path(path).read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            names = os.listxattr(path, follow_symlinks=False)
            notes = {key: os.getxattr(path, key, follow_symlinks=False) for key in names}
            found[os.path.relpath(path, root)] = (info.st_mode, info.st_uid, info.st_mtime_ns, content, notes)
    return found


def without_times(found: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """The same but for when things were changed."""
    return {path: (mode, owner, *rest) for path, (mode, owner, _time, *rest) in found.items()}


@settings(max_examples=60, deadline=None)
@given(
    base=st.lists(OPERATIONS, max_size=8),
    rounds=st.lists(st.lists(OPERATIONS, max_size=6), min_size=2, max_size=5),
    kept=st.integers(0, 2),
    after=st.lists(OPERATIONS, max_size=6),
)
def test_one_layer_shows_what_many_showed(
    base: list[Operation], rounds: list[list[Operation]], kept: int, after: list[Operation]
) -> None:
    """Also when layers stay below it, and when the view is changed afterwards."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        top = Path(name)
        (top / "base").mkdir()
        for operation in base:
            apply(top / "base", operation)
        stack = [top / "base"]
        for number, operations in enumerate(rounds):
            with overlay(stack, top / f"round{number}") as view:
                for operation in operations:
                    apply(view, operation)
            stack.insert(0, top / f"round{number}" / "upper")
        count = max(2, len(rounds) - kept)
        flatten.flatten([str(each) for each in stack[:count]], str(top / "flat"))
        with overlay(stack, top / "many") as many, overlay([top / "flat", *stack[count:]], top / "one") as one:
            assert listing(one) == listing(many)
            for operation in after:
                apply(many, operation)
                apply(one, operation)
            assert without_times(listing(one)) == without_times(listing(many))
