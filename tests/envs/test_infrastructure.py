"""Failing sandboxes, shared preparation, and the pure parts of reading and judging a work tree."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.conftest import Sandboxes
from envs.repair import FIX, GOLD, row, task
from skyenv.core import Sandbox, SandboxProvider
from skyenv.envs.swe.env import SWEEnv
from skyenv.envs.swe.environment import Environments
from skyenv.envs.swe.extraction import MAX_CHANGED_BYTES, compare
from skyenv.envs.swe.gitstream import two_commits
from skyenv.envs.swe.policy import Change, Policy
from skyenv.envs.swe.progress import Progress
from skyenv.envs.swe.sources import TreeFile
from skyenv.envs.swe.validation import validate_task
from skyenv.errors import ConfigError, SandboxLost, SandboxProtocolError
from skyenv.types import ToolCall


class Flaky:
    """A provider that counts, and whose n-th sandboxes are lost as soon as a command runs in them."""

    def __init__(self, provider: SandboxProvider, lost: set[int]) -> None:
        self._provider, self._lost = provider, lost
        self.opened = 0

    @asynccontextmanager
    async def sandbox(self, image: str | None = None, **spec: Any) -> AsyncIterator[Sandbox]:
        self.opened += 1
        lost = self.opened in self._lost
        async with self._provider.sandbox(image, **spec) as box:
            yield box
            if lost:
                raise SandboxLost("gone")

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._provider.delete_snapshot(snapshot)


@pytest.mark.parametrize(("lost", "status", "reward"), [({2}, "resolved", 1.0), ({2, 3}, "infra_error", None)])
def test_a_lost_grading_sandbox_is_replaced_once(
    sandboxes: Sandboxes, lost: set[int], status: str, reward: float | None
) -> None:
    async def play(provider: SandboxProvider) -> None:
        flaky = Flaky(provider, lost)
        async with SWEEnv([row()], flaky) as env:
            await env.areset()
            await env.astep(ToolCall("execute_bash", {"command": FIX}))
            found, verdict = await env.aevaluate()
        assert (found, verdict["status"]) == (reward, status)
        assert verdict["valid_for_training"] is (reward is not None)

    sandboxes.run(play)


def test_many_at_once_prepare_once(sandboxes: Sandboxes) -> None:
    prepared = task(environment={"setup": ["true"]})

    async def start(provider: SandboxProvider) -> None:
        flaky = Flaky(provider, set())
        environments = Environments.of(flaky)
        assert Environments.of(flaky) is environments

        async def one() -> None:
            async with environments.open(prepared):
                pass

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(one)
        assert flaky.opened == 5
        await environments.aclose()
        await environments.aclose()

    sandboxes.run(start)


def packed(*members: tuple[str, bytes | str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
            else:
                member.type, _, member.linkname = content[:1].encode(), None, content[1:]
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def test_a_work_tree_is_compared_as_data() -> None:
    base = {"same": TreeFile(b"1"), "changed": TreeFile(b"1"), "gone": TreeFile(b"1"), "x/__pycache__/a": TreeFile(b"")}
    archive = packed(
        ("./same", b"1"),
        ("changed", b"2"),
        ("link", "2same"),
        ("hard", "1changed"),
        ("fifo", "6"),
        ("device", "3"),
        ("dir", "5"),
    )
    tree = compare(archive, base)
    assert [change.path for change in tree.changes] == ["changed", "gone", "hard", "link"]
    assert tree.changes[1].new is None
    assert tree.changes[2].new == TreeFile(b"2")
    assert tree.changes[3].new is not None
    assert (tree.changes[3].new.data, oct(tree.changes[3].new.mode)) == (b"same", "0o120777")
    assert set(tree.specials) == {"fifo", "device"}


def test_limits_of_a_work_tree() -> None:
    assert compare(packed(("big", bytes(MAX_CHANGED_BYTES + 1))), {}).too_large
    assert compare(packed(), {f"f{n}": TreeFile(b"") for n in range(3000)}).too_large
    with pytest.raises(SandboxProtocolError):
        compare(b"no tar at all" * 100, {})


@given(st.binary(max_size=2000))
@settings(max_examples=50)
def test_hostile_archives_are_an_error_or_data(data: bytes) -> None:
    valid = packed(("a", b"x" * 600))
    for archive in (data, valid[:512] + data + valid[512:], data + valid):
        try:
            compare(archive, {})
        except SandboxProtocolError:
            pass


def test_sparse_and_huge_files_are_never_read(sandboxes: Sandboxes) -> None:
    async def play(provider: SandboxProvider) -> dict[str, Any]:
        async with SWEEnv([row()], provider) as env:
            await env.areset()
            command = "truncate -s 10G huge; truncate -s 9G .git/huge"
            await env.astep(ToolCall("execute_bash", {"command": command}))
            return (await env.aevaluate())[1]

    verdict = sandboxes.run(play)
    assert verdict["status"] == "patch_too_large"


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..") and not name.lower().startswith((".git", "git~"))
)
FILES = st.builds(TreeFile, st.binary(max_size=30), st.sampled_from([0o644, 0o755]))


@given(st.dictionaries(NAMES, FILES, max_size=4), st.dictionaries(NAMES, FILES, max_size=4))
@settings(max_examples=15, deadline=None)
def test_any_change_travels_through_git_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, old: dict[str, TreeFile], new: dict[str, TreeFile]
) -> None:
    directory = tmp_path_factory.mktemp("git")
    changes = [
        Change(path, old.get(path), new.get(path))
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    ]  # fmt: skip
    git = partial(subprocess.run, cwd=directory, check=True, stdout=subprocess.PIPE)
    git(["git", "init", "-q", "--bare", "."])
    git(["git", "fast-import", "--quiet"], input=two_commits(changes))
    for branch, tree in (("old", old), ("new", new)):
        listed = git(["git", "ls-tree", "-r", "-z", branch]).stdout.split(b"\0")[:-1]
        found = {line.partition(b"\t")[2].decode(): line.split()[:3] for line in listed}
        expected = {change.path: tree[change.path] for change in changes if change.path in tree}
        assert set(found) == set(expected)
        for path, (mode, _, name) in found.items():
            assert git(["git", "cat-file", "blob", name.decode()]).stdout == expected[path].data
            assert int(mode, 8) & 0o777 == expected[path].mode


POLICY = Policy(
    base={"pkg/__init__.py": TreeFile(b""), "src/pytest/__init__.py": TreeFile(b""), "setup.cfg": TreeFile(b"[a]\n")},
    tests={"pkg/tests/unit/test_a.py": TreeFile(b""), "test_top.py": TreeFile(b"")},
    runner_modules=frozenset({"pytest"}),
    import_roots=("python",),
)
REASONS = {
    "pkg/code.py": None,
    "pkg/pytest.py": None,
    "json/data.txt": None,
    "json/__init__.py": "shadowing_module",
    "src/json.py": "shadowing_module",
    "types.ini": None,
    "Makefile": None,
    "json": None,
    "src/pytest/new.py": None,
    "testing/code.py": None,
    "pkg/conftest_helper.py": None,
    "pkg/tests/other.py": "test_file",
    "pkg/tests": "test_file",
    "pkg": "test_file",
    "test_top.py": "test_file",
    "test_top.py/x": "test_file",
    "deep/conftest.py": "runner_config",
    "tox.ini": "runner_config",
    "pytest.py": "shadowing_module",
    "pytest/__init__.py": "shadowing_module",
    "pytest.so": "shadowing_module",
    "python/pytest.py": "shadowing_module",
    "lib/pytest.py": "shadowing_module",
    "a/sitecustomize.py": "start_up_file",
    "a.pth": "start_up_file",
    "a.egg-info/PKG-INFO": "package_metadata",
    "a/.GIT/config": "unsafe_path",
    "../x": "unsafe_path",
    "a//b": "unsafe_path",
}


@pytest.mark.parametrize("path", REASONS)
def test_policy(path: str) -> None:
    selection = POLICY.select([Change(path, None, TreeFile(b""))])
    assert selection.flags == ((REASONS[path],) if REASONS[path] else ())
    assert (selection.kept == ()) == (selection.dropped == (path,)) == bool(REASONS[path])


@pytest.mark.parametrize(
    ("path", "old", "new", "dropped"),
    [
        ("setup.cfg", b"[metadata]\nversion = 1\n", b"[metadata]\nversion = 2\n", False),
        ("setup.cfg", b"[a]\n", b"[a]\n[tool:pytest]\naddopts = -x\n", True),
        ("setup.cfg", b"[a]\n", b"\xff", True),
        ("setup.cfg", b"[a]\n", b"no section", True),
        ("pyproject.toml", b"[project]\nversion = '1'\n", b"[project]\nversion = '2'\n", False),
        ("pyproject.toml", b"", b"[tool.pytest]\nx = 1\n", True),
        ("pyproject.toml", b"", b"[tool.pytest.ini_options]\naddopts = '-x'\n", True),
        ("pyproject.toml", b"", b"not toml", True),
        ("pyproject.toml", b"[tool.pytest]\nx = 1\n", None, True),
        ("pyproject.toml", b"[project]\n", None, False),
    ],
)
def test_policy_of_shared_files(path: str, old: bytes, new: bytes | None, dropped: bool) -> None:
    change = Change(path, TreeFile(old), None if new is None else TreeFile(new))
    assert bool(POLICY.select([change]).dropped) is dropped


@pytest.mark.parametrize(
    ("path", "target", "dropped"),
    [
        ("a", "b", False),
        ("d/a", "../b", False),
        ("a", "/etc", True),
        ("a", "../b", True),
        ("d/a", "../../b", True),
        (".gitmodules", "x", True),
    ],
)
def test_policy_of_links(path: str, target: str, dropped: bool) -> None:
    change = Change(path, None, TreeFile(target.encode(), 0o120777))
    assert bool(POLICY.select([change]).dropped) is dropped


def test_nothing_is_earned_by_doing_it_again() -> None:
    """Progress is what was reached, in whatever order and however often."""
    actions = [
        (ToolCall("execute_bash", {"command": "cat /testbed/calc.py"}), "def add"),
        (ToolCall("execute_bash", {"command": "python3 t.py"}), "Traceback (most recent call last)"),
        (ToolCall("str_replace_editor", {"command": "str_replace", "path": "/testbed/calc.py"}), "edited"),
        (ToolCall("execute_bash", {"command": "python3 t.py"}), "AssertionError"),
        ({"error": "no call"}, "no call"),
        ({"name": "finish", "arguments": "none"}, ""),
    ]
    once, often = Progress(task()), Progress(task())
    for action, observation in actions:
        once.watch(action, observation)
    for action, observation in actions * 3:
        often.watch(action, observation)
    verdict = {"patch": GOLD, "tests": {"a": "failed"}}
    assert once.milestones(verdict) == often.milestones(verdict)
    assert once.milestones(verdict) == dict.fromkeys(("viewed", "reproduced", "edited", "imports"), True)
    late = Progress(task())
    for action, observation in reversed(actions[:3]):
        late.watch(action, observation)
    assert late.milestones({"patch": "", "tests": {"a": "error"}}) == {
        "viewed": True, "reproduced": False, "edited": False, "imports": False,
    }  # fmt: skip


def test_missing_reference_files_are_named(sandboxes: Sandboxes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"calc-unittest: reference\.path: .*absent"):
        sandboxes.run(lambda provider: validate_task(task(reference={"path": str(tmp_path / "absent")}), provider))
