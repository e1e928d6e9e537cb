"""Patches of task rows, applied on the host to trees: what a test patch adds, changes and deletes.

Only git reads a patch, in a scratch directory that holds nothing but the files that it names; paths that leave the
directory are refused by git itself. A binary file without its content, as old data sets have it, is left out.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tempfile
from pathlib import Path

from anyio import to_thread

from skyenv.envs.swe.sources import Tree, TreeFile, diff_trees
from skyenv.envs.swe.tasks import PatchFile, PatchText, SweTask
from skyenv.envs.swe.trees import git, read_directory
from skyenv.errors import ConfigError

_SECTION = re.compile(rb"^(?=diff --git )", re.MULTILINE)
_NO_CONTENT = re.compile(rb"^Binary files .* differ\r?$", re.MULTILINE)


async def read_patch(patch: PatchText | PatchFile, task: SweTask, field: str = "tests") -> bytes:
    """The bytes of a patch. ConfigError when its file cannot be read."""
    if isinstance(patch, PatchText):
        return patch.patch
    path = task.base / patch.path
    try:
        return await to_thread.run_sync(path.read_bytes)
    except OSError as error:
        raise ConfigError(f"{task.task_id}: {field}.path: {path}: {error.strerror}") from error


def patched_files(base: Tree, patch: bytes, what: str, *, reverse: bool = False) -> tuple[Tree, tuple[str, ...]]:
    """The files of `base` that a patch adds or changes, as they are then, and the paths that it deletes; blocks.

    With `reverse` the patch is taken back. ConfigError, naming `what`, when it does not apply.
    """
    patch = b"".join(part for part in _SECTION.split(patch) if not _NO_CONTENT.search(part))
    with tempfile.TemporaryDirectory(prefix="skyenv-patch-") as scratch:
        root = Path(scratch) / "tree"
        root.mkdir()
        file = Path(scratch) / "patch"
        file.write_bytes(patch)
        try:
            git(["init", "--quiet", "."], root)
            touched = _touched(file, root)
            for path in touched:
                if path in base:
                    _write(root, path, base[path])
            git(["apply", "--whitespace=nowarn", *(["-R"] if reverse else []), str(file)], root)
        except subprocess.CalledProcessError as error:
            detail = error.stderr.decode(errors="replace").strip()[-300:]
            raise ConfigError(f"{what}: the patch does not apply: {detail}") from error
        found = read_directory(root, what) if any(root.glob("[!.]*")) or any(root.glob(".[!g]*")) else {}
    changed = {path: file for path, file in found.items() if base.get(path) != file}
    return changed, tuple(path for path in touched if path in base and path not in found)


def reversed_patch(base: Tree, patch: bytes, what: str) -> bytes:
    """The patch that takes `patch` back from `base`, which has it; blocks. ConfigError when it does not."""
    changed, removed = patched_files(base, patch, what, reverse=True)
    old = {path: base[path] for path in (*changed, *removed) if path in base}
    return diff_trees(old, changed)


def _touched(patch: Path, root: Path) -> list[str]:
    """Every path that a patch names, both sides of a rename."""
    listing = git(["apply", "--numstat", "-z", str(patch)], root)
    paths: list[str] = []
    fields = iter(listing.split(b"\0")[:-1])
    for field in fields:
        name = field.split(b"\t", 2)[-1]
        names = [name] if name else [next(fields), next(fields)]
        paths += [os.fsdecode(name) for name in names if name]
    sides = re.findall(rb"^(?:rename|copy) from (.+)$", patch.read_bytes(), re.MULTILINE)
    return list(dict.fromkeys([*paths, *(os.fsdecode(side) for side in sides)]))


def _write(root: Path, path: str, file: TreeFile) -> None:
    place = root / path
    if not place.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{path!r}: leaves the tree")
    place.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(file.mode):
        place.symlink_to(os.fsdecode(file.data))
    else:
        place.write_bytes(file.data)
        place.chmod(0o755 if file.mode & 0o111 else 0o644)
