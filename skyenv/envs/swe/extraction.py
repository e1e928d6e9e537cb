"""What an agent left behind, read from outside: its work tree as data, compared with the pristine source.

Everything the agent started is killed first. The node packs the work tree; no program of the sandbox takes part, and
nothing of its git (index, objects, configuration, attributes, hooks) is read, so commits, staging, ignore rules and a
deleted or broken `.git` make no difference. Nested repositories become plain files. Content is bytes end to end.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from anyio import to_thread

from skyenv.core import Sandbox
from skyenv.envs.swe.policy import Change, is_cache
from skyenv.envs.swe.sources import Tree, TreeFile
from skyenv.envs.swe.trees import CACHE_NAMES
from skyenv.errors import SandboxPathError, SandboxProtocolError

MAX_FILES = 2_000
MAX_CHANGED_BYTES = 64 << 20
SYMLINK_MODE = stat.S_IFLNK | 0o777
MAX_DEPTH = 100
EXCLUDED = CACHE_NAMES | {".git"}


@dataclass(frozen=True, slots=True)
class WorkTree:
    """The differences between a work tree and the pristine source, in path order.

    `missing` when there is no directory where the repository was, `too_large` when the changes exceed the limits (and
    are then incomplete), `specials` are paths that are neither file, link nor directory.
    """

    changes: tuple[Change, ...] = ()
    specials: tuple[str, ...] = ()
    missing: bool = False
    too_large: bool = False


async def read_work_tree(box: Sandbox, repo_path: str, base: Tree) -> WorkTree:
    """Stop everything in `box` and compare the tree at `repo_path` with `base`. Raises SandboxError only."""
    await box.kill_processes()
    allowed = MAX_CHANGED_BYTES + sum(len(file.data) for file in base.values())
    try:
        archive = await download_bounded(box, repo_path, allowed)
    except SandboxPathError as error:
        too_large = error.errno in (errno.EFBIG, errno.EOVERFLOW)
        return WorkTree(missing=not too_large, too_large=too_large)
    return await to_thread.run_sync(compare, archive, base)


async def download_bounded(
    box: Sandbox, path: str, max_bytes: int, exclude: frozenset[str] = frozenset(EXCLUDED)
) -> bytes:
    """Download a tree without what git and caches keep. `SandboxPathError` with EFBIG when its files are larger.

    Sizes are looked at first, so that a huge or sparse file costs nothing; nothing may run in `box` meanwhile.
    """
    left = max_bytes
    for entry in await box.list_dir(path, depth=MAX_DEPTH):
        if entry.kind == "file" and not exclude.intersection(entry.path.removeprefix(path).split("/")):
            left -= entry.size
    if left < 0:
        raise SandboxPathError(errno.EFBIG, f"more than {max_bytes} bytes", path)
    return await box.download(path, exclude=sorted(exclude))


def compare(archive: bytes, base: Tree) -> WorkTree:
    """Compare a packed work tree with `base`. SandboxProtocolError when it is not a tar."""
    changes: list[Change] = []
    specials: list[str] = []
    seen: set[str] = set()
    left = MAX_CHANGED_BYTES
    try:
        for path, file in entries(archive):
            seen.add(path)
            if file is None:
                specials.append(path)
            elif base.get(path) != file:
                changes.append(Change(path, base.get(path), file))
                left -= len(file.data)
            if left < 0 or len(changes) > MAX_FILES:
                return WorkTree(too_large=True)
    except tarfile.TarError as error:
        raise SandboxProtocolError(f"the packed work tree cannot be read: {error}") from error
    gone = [Change(path, old, None) for path, old in base.items() if path not in seen and not is_cache(path)]
    ordered = sorted([*changes, *gone], key=lambda change: change.path)
    return WorkTree(tuple(ordered), tuple(specials), too_large=len(ordered) > MAX_FILES)


def entries(archive: bytes) -> Iterator[tuple[str, TreeFile | None]]:
    """Paths relative to the top of a packed tree; None for what is neither file nor link, directories left out."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:", errors="surrogateescape") as tar:
        for member in tar:
            path = member.name.removeprefix("./").rstrip("/")
            if member.isdir() or path in ("", "."):
                continue
            if member.issym():
                yield path, TreeFile(os.fsencode(member.linkname), SYMLINK_MODE)
            elif (member.isreg() or member.islnk()) and (content := tar.extractfile(member)) is not None:
                yield path, TreeFile(content.read(), 0o755 if member.mode & 0o111 else 0o644)
            else:
                yield path, None
