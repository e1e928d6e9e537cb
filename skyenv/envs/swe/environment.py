"""Sandboxes ready for a task: what its environment installs is prepared once per provider and frozen, then shared.

A prepared snapshot is keyed by the environment alone (image, packages, set-up commands and their variables), never by
the task, and made once however many ask at the same time. Packages are wheels fetched on the host and installed
without a network. A sandbox then gets the pristine source, unless it lies in the image already, where `images` makes
it pristine; `start_repository` makes it the agent's repository with one root commit. Nothing but the source ever
enters an agent's sandbox: no row, no tests, no ids, no reference.
"""

from __future__ import annotations

import io
import json
import logging
import shlex
import tarfile
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from skyenv.core import Sandbox, SandboxProvider, WarmProvider
from skyenv.envs.swe.images import clean_image
from skyenv.envs.swe.patches import patched_files, read_patch
from skyenv.envs.swe.runners.harbor import AGENT_LOGS, ARTIFACTS, LOGS
from skyenv.envs.swe.sources import DirectorySource, ImageSource, Tree, default_cache, fetch_tree, select, tree_to_tar
from skyenv.envs.swe.tasks import Environment, SourceFiles, SweTask
from skyenv.envs.swe.wheels import THIS_PYTHON, fetch_wheels
from skyenv.errors import ConfigError, SandboxError

VENV, AGENT = "/opt/skyenv/venv", "/opt/skyenv/agent"
SETUP_SECONDS = 1800.0
_WHEELS = "/opt/skyenv/wheels"
_INSTALLER = "pip==25.3"
_TREES_KEPT = 128
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The pristine source of a task and its graded test files.

    `archive` is the source packed, empty when it lies in the image; `removed` are paths that the graded tests delete.
    """

    source: Tree
    archive: bytes
    tests: Tree
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A frozen sandbox with an environment in it and the `PATH` it had; None when there was nothing to prepare.

    `trees` are the repository of an image before and after what no agent may see was removed.
    """

    snapshot: str | None = None
    path: str | None = None
    trees: tuple[Tree, Tree] | None = None

    def variables(self, environment: Environment) -> dict[str, str]:
        """What every session gets: the environment's own variables, and its virtual environment activated."""
        env = dict(environment.env)
        if self.path is not None:
            path = [env.get("PATH", self.path)]
            if environment.packages:
                path.insert(0, f"{VENV}/bin")
                env["VIRTUAL_ENV"] = VENV
            if environment.agent_packages:
                path.append(f"{AGENT}/bin")
            env["PATH"] = ":".join(path)
        return env


class Environments:
    """Prepared sandboxes of one provider; safe to share between concurrent tasks.

    The provider is the caller's, who keeps it: it is only referred to weakly. Snapshots stay with it until `aclose`, or
    until it goes.
    """

    def __init__(self, provider: SandboxProvider, *, cache: Path | None = None) -> None:
        self._provider = weakref.ref(provider)
        self.cache = cache or default_cache()
        self._locks: dict[str, anyio.Lock] = {}
        self._prepared: dict[str, _Prepared | ConfigError] = {}
        self._files: OrderedDict[SweTask, TaskFiles] = OrderedDict()
        self.forks = True
        """Whether a sandbox of this provider can be frozen for others, as far as is known."""

    @staticmethod
    def of(provider: SandboxProvider) -> Environments:
        """Return the one that all users of `provider` share, so that siblings pay for one preparation."""
        found = _SHARED.get(provider)
        if found is None:
            found = _SHARED[provider] = Environments(provider)
        return found

    @property
    def provider(self) -> SandboxProvider:
        """The provider. SandboxError when its owner has let it go."""
        provider = self._provider()
        if provider is None:
            raise SandboxError("the sandbox provider is gone")
        return provider

    async def files(self, task: SweTask) -> TaskFiles:
        """Return the files of `task`. ConfigError when they are wrong, `SourceUnavailable` when out of reach."""
        if (found := self._files.get(task)) is not None:
            self._files.move_to_end(task)
            return found
        files = await self._files_of(task)
        self._files[task] = files
        while len(self._files) > _TREES_KEPT:
            self._files.popitem(last=False)
        return files

    async def _files_of(self, task: SweTask) -> TaskFiles:
        whole: Tree = {}
        if task.in_image:
            prepared = await self._prepare(task)
            whole, source = prepared.trees or ({}, {})
            archive = b""
        else:
            source = await fetch_tree(task.source, base=task.base, cache=self.cache)
            archive = await to_thread.run_sync(tree_to_tar, source)
        match task.tests:
            case SourceFiles(ImageSource(), paths):
                return TaskFiles(source, archive, select(whole, paths) if paths else whole)
            case SourceFiles(place, paths):
                tests = await fetch_tree(place, base=task.base, cache=self.cache)
                return TaskFiles(source, archive, select(tests, paths) if paths else tests)
            case patch:
                data = await read_patch(patch, task)
                tests, removed = await to_thread.run_sync(patched_files, source, data, f"{task.task_id}: tests")
                return TaskFiles(source, archive, tests, removed)

    async def _machine_files(self, task: SweTask) -> bytes:
        """What lies in the working directory at the beginning, packed."""
        if not task.files:
            return b""
        tree = await fetch_tree(DirectorySource(task.files), base=task.base, cache=self.cache)
        return await to_thread.run_sync(tree_to_tar, tree)

    @asynccontextmanager
    async def open(self, task: SweTask, **spec: Any) -> AsyncIterator[Sandbox]:
        """Open a sandbox with the environment and the pristine source of `task`, and no repository.

        Raises SandboxError; ConfigError when the set-up of the environment fails.
        """
        archive = await self._machine_files(task) if task.whole_machine else (await self.files(task)).archive
        prepared = await self._prepare(task)
        async with self._sandbox(task, prepared, prepared.snapshot, spec) as box:
            if archive:
                await box.upload(task.repo_path, archive)
            await _activate(box, task.environment)
            yield box

    @asynccontextmanager
    async def open_from(self, task: SweTask, snapshot: str) -> AsyncIterator[Sandbox]:
        """Open a sandbox of `task` from a snapshot of another one of it, files alone. Raises as `open`."""
        async with self._sandbox(task, await self._prepare(task), snapshot, {}) as box:
            await _activate(box, task.environment)
            yield box

    def _sandbox(
        self, task: SweTask, prepared: _Prepared, snapshot: str | None, spec: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[Sandbox]:
        environment = task.environment
        variables = prepared.variables(environment)
        wanted = {**environment.spec, **spec}
        return self.provider.sandbox(environment.image, snapshot=snapshot, env=variables, **wanted)

    async def prefetch(self, tasks: Sequence[SweTask], count: int) -> None:
        """Fetch sources, prepare environments, and have `count` sandboxes of each task warm where the provider can.

        Raises as `open`, at the first task that cannot be had.
        """
        wanted: Counter[str] = Counter()
        chosen: dict[str, SweTask] = {}
        for task in tasks:
            if not task.whole_machine:
                await self.files(task)
            await self._prepare(task)
            wanted[task.environment.key] += count
            chosen[task.environment.key] = task
        provider = self.provider
        if not isinstance(provider, WarmProvider):
            return
        for key, task in chosen.items():
            prepared, environment = await self._prepare(task), task.environment
            variables, spec = prepared.variables(environment), environment.spec
            snapshot = prepared.snapshot
            await provider.prefetch(environment.image, snapshot=snapshot, env=variables, count=wanted[key], **spec)

    async def forget(self, snapshot: str) -> None:
        """Delete a snapshot that was taken of a sandbox of this provider."""
        await self.provider.delete_snapshot(snapshot)

    async def aclose(self) -> None:
        """Delete the snapshots; idempotent."""
        prepared, self._prepared = self._prepared, {}
        for item in prepared.values():
            if isinstance(item, _Prepared) and item.snapshot is not None:
                await self.provider.delete_snapshot(item.snapshot)

    async def _prepare(self, task: SweTask) -> _Prepared:
        """Prepare once; a wrong row fails at once from then on, an infrastructure failure is tried again."""
        key = task.environment.key
        if task.in_image:
            hidden = json.dumps([str(task.source), task.hidden, task.whole_machine, str(task.source_patch)])
            key = f"{key} {task.repo_path} {hidden}"
        async with self._locks.setdefault(key, anyio.Lock()):
            found = self._prepared.get(key)
            if found is None:
                try:
                    found = await self._build(task)
                except ConfigError as error:
                    found = error
                self._prepared[key] = found
        if isinstance(found, ConfigError):
            raise found
        return found

    async def _build(self, task: SweTask) -> _Prepared:
        environment = task.environment
        in_image = task.in_image and not task.whole_machine
        packages = {VENV: environment.packages, AGENT: environment.agent_packages}
        if not any(packages.values()) and not environment.setup and not in_image and not task.hidden:
            return _Prepared()
        python = environment.python or THIS_PYTHON
        wheels = {venv: await self._wheels(wanted, python) for venv, wanted in packages.items() if wanted}
        async with self.provider.sandbox(environment.image, env=dict(environment.env), **environment.spec) as box:
            path = None
            if wheels:
                path = (await box.exec('printf %s "$PATH"')).output
            for venv, files in wheels.items():
                await _install(box, venv, files, packages[venv], python)
            if VENV in wheels:
                await box.exec(f'export PATH="{VENV}/bin:$PATH" VIRTUAL_ENV={VENV}')
            for command in environment.setup:
                await _run(box, command, f"environment.setup: {command!r}")
            trees = await clean_image(box, task) if in_image else None
            if task.hidden and not in_image:
                await _run(box, f"rm -rf -- {' '.join(map(shlex.quote, task.hidden))}", "hidden")
            await box.kill_processes()
            _log.info("prepared an environment with %d packages", len(environment.packages))
            return _Prepared(await box.snapshot(shell=False), path, trees)

    async def _wheels(self, packages: tuple[str, ...], python: str) -> list[Path]:
        """The installer's wheel, then those of the packages and of what they need."""
        wanted = await fetch_wheels(packages, cache=self.cache, python=python)
        installer = await fetch_wheels([_INSTALLER], cache=self.cache, python=python)
        return [*installer, *(wheel for wheel in wanted if not wheel.name.startswith("pip-"))]


_SHARED: weakref.WeakKeyDictionary[SandboxProvider, Environments] = weakref.WeakKeyDictionary()
# Keyed by the provider because whoever makes an environment for each trajectory hands over nothing else.


async def _install(box: Sandbox, venv: str, wheels: list[Path], packages: tuple[str, ...], python: str) -> None:
    """Make the virtual environment; the first wheel is the installer and is not installed itself."""
    await box.upload(_WHEELS, await to_thread.run_sync(partial(_pack, wheels)))
    names = " ".join(shlex.quote(f"{_WHEELS}/{wheel.name}") for wheel in wheels[1:])
    installer = shlex.quote(f"{_WHEELS}/{wheels[0].name}")
    what = f"environment.packages: {', '.join(packages)}"
    interpreter = f"$(command -v python{python} || echo python3)"  # images may name one only
    await _run(box, f"{interpreter} -m venv --without-pip {venv}", what)
    await _run(box, f"PYTHONPATH={installer} {venv}/bin/python -m pip install -q --no-index --no-deps {names}", what)
    await _run(box, f"rm -rf {_WHEELS}", what)


def _pack(wheels: list[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for wheel in wheels:
            archive.add(wheel, wheel.name)
    return buffer.getvalue()


async def _activate(box: Sandbox, environment: Environment) -> None:
    if environment.activate:
        await _run(box, environment.activate, f"environment.activate: {environment.activate!r}")


async def _run(box: Sandbox, command: str, what: str) -> None:
    result = await box.exec(command, timeout=SETUP_SECONDS)
    if result.oom:
        raise SandboxError(f"{what}: out of memory")
    if result.exit_code:
        raise ConfigError(f"{what} failed with status {result.exit_code}: {result.output[-800:].strip()}")


_GIT_INIT = """(cd {repo} && export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_TEMPLATE_DIR= &&
git -c init.defaultBranch=main init -q && git add -A -f . &&
GIT_AUTHOR_DATE='2000-01-01T00:00:00Z' GIT_COMMITTER_DATE='2000-01-01T00:00:00Z' \
git -c user.name=skyenv -c user.email=skyenv@localhost -c core.logAllRefUpdates=false -c core.hooksPath=/dev/null \
-c gc.auto=0 -c maintenance.auto=false commit -q --allow-empty -m 'Initial commit')"""


async def start_repository(box: Sandbox, repo_path: str) -> None:
    """Turn the source at `repo_path` into a git repository with one root commit and stand in it. Raises SandboxError.

    Identity and date are fixed, so siblings see equal commits; there is no remote, tag, reflog or other ref.
    """
    repo = shlex.quote(repo_path)
    result = await box.exec(f"{_GIT_INIT.format(repo=repo)} && cd {repo}", timeout=120.0)
    if result.exit_code:
        raise SandboxError(f"git in the sandbox failed with status {result.exit_code}: {result.output[-400:].strip()}")


async def start_machine(box: Sandbox, path: str) -> None:
    """Make the places that a task of the whole machine may count on, and stand in its directory."""
    await box.exec(f"mkdir -p {AGENT_LOGS} {ARTIFACTS} {LOGS}")
    await enter_directory(box, path)


async def enter_directory(box: Sandbox, path: str) -> None:
    """Stand in a directory of the machine as it is, making it if it is not there. Raises SandboxError."""
    place = shlex.quote(path)
    result = await box.exec(f"mkdir -p {place} && cd {place}")
    if result.exit_code:
        raise SandboxError(f"cannot enter {path} in the sandbox: {result.output[-400:].strip()}")
