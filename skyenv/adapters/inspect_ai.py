"""inspect-ai: our sandboxes as a sandbox provider, so that its evaluations run on a node or a fleet.

Importing this module registers the provider `skyenv`. Each sample has a sandbox, and a thread with an event loop on
which the client lives from `sample_init` to `sample_cleanup`, so that inspect may run on any loop and end its samples
in any order. Commands of one sandbox run one after another, each in a process of its own with streams of its own; none
is ever run twice. What the sandbox cannot do is inspect's `SandboxUnavailableError`, which no model takes for output.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import shlex
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, Literal, TypeVar, overload

import anyio
from anyio import to_thread
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

import skyenv
from skyenv.core import Sandbox
from skyenv.errors import ConfigError, EnvError, SandboxError, SandboxPathError
from skyenv.portal import Portal

T = TypeVar("T")
URL, TOKEN = "SKYENV_SANDBOX_URL", "SKYENV_SANDBOX_TOKEN"
STREAMS = "/tmp/.skyenv_inspect"
LONGEST = 6 * 86400.0
INTERRUPT_SECONDS = 30.0
ROOT = (None, "root", "0")
_NOT_EXECUTABLE = 126


class SkyenvSandboxConfig(BaseModel, frozen=True):
    """Where a sample's sandbox comes from and what it may use; a text in its place is the image alone.

    `url` None: `$SKYENV_SANDBOX_URL`, or a node in this process for each sample. The token comes from
    `$SKYENV_SANDBOX_TOKEN` alone, since configurations stand in logs. `limits`: memory_bytes, pids, cpus, file_bytes,
    disk_bytes, tmpfs_bytes, ttl (seconds without any use, one hour unless said).
    """

    model_config = ConfigDict(extra="forbid")

    image: str | None = None
    url: str | None = None
    workdir: str = "/workspace"
    env: dict[str, str] = {}
    limits: dict[str, float] = {}
    network: Literal["none", "host"] = "none"

    def __hash__(self) -> int:
        """By content: inspect looks configurations up."""
        return hash(self.model_dump_json())


@sandboxenv(name="skyenv")
class SkyenvSandbox(SandboxEnvironment):
    """One sample's sandbox. Made by `sample_init`, closed by `sample_cleanup`."""

    def __init__(self, owned: ExitStack, portal: Portal, box: Sandbox, workdir: str) -> None:
        super().__init__()
        self._owned, self._portal, self._box, self._workdir = owned, portal, box, workdir
        self._one_at_a_time = anyio.Lock()
        self._threads = anyio.CapacityLimiter(8)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Open a sandbox. ConfigError for wrong settings, SandboxError when none can be had."""
        opening = functools.partial(_open, _settings(config))
        with anyio.CancelScope(shield=True):  # what was opened meanwhile has to be handed over to be closed
            opened = await to_thread.run_sync(opening)
        return {"default": cls(*opened)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Delete the sandboxes, of interrupted samples too."""
        with anyio.CancelScope(shield=True):
            for environment in environments.values():
                await to_thread.run_sync(environment.as_type(SkyenvSandbox)._owned.close)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """The configuration from a log."""
        return SkyenvSandboxConfig(**config)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program. A command that ran out of time is not repeated, whatever `timeout_retry` says.

        A stream beyond the limit raises `OutputLimitExceededError` with its end.
        """
        if user not in ROOT:
            raise SandboxUserUnsupportedError(f"sandboxes of skyenv run everything as root, not as {user!r}")
        data = input.encode() if isinstance(input, str) else input or b""
        script = _script(cmd, self._path(cwd or ""), env or {})
        most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE  # of the caller's context
        async with self._one_at_a_time:
            code, (out, cut), (err, cut_too) = await self._run(
                functools.partial(_exec, self._box, script, data, timeout or LONGEST, most)
            )
        if cut or cut_too:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, out if cut else err)
        if code == _NOT_EXECUTABLE and "Permission denied" in err:
            raise PermissionError(f"permission denied executing {cmd[0]}")
        return ExecResult(success=code == 0, returncode=code, stdout=out, stderr=err)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, its directories made."""
        data = contents.encode() if isinstance(contents, str) else contents
        await self._run(functools.partial(self._box.write_file, self._path(file), data))

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file; line ends stay as they are."""
        most = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data = await self._run(functools.partial(self._box.read_file, self._path(file), max_bytes=most + 1))
        if len(data) > most:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    def default_polling_interval(self) -> float:
        """How often inspect looks for requests of programs inside, in seconds."""
        return 0.2

    def _path(self, path: str) -> str:
        return posixpath.join(self._workdir, path)

    async def _run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a call on the client's thread; a cancelled one ends there too."""
        actor = self._portal.actor()
        try:
            future = actor.submit(call)
            waiting = functools.partial(to_thread.run_sync, abandon_on_cancel=True, limiter=self._threads)
            try:
                found: T = await waiting(future.result)
            except SandboxPathError as error:
                raise OSError(error.errno, error.strerror, error.filename) from error
            except SandboxError as error:
                raise SandboxUnavailableError(f"{type(error).__name__}: {error}") from error
            return found
        finally:
            actor.cancel()
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(actor.close, limiter=self._threads)


def _settings(config: SandboxEnvironmentConfigType | None) -> SkyenvSandboxConfig:
    if isinstance(config, SkyenvSandboxConfig):
        return config
    if config is None or isinstance(config, str):
        return SkyenvSandboxConfig(image=config)
    raise ConfigError(f"sandbox: {type(config).__name__} is not SkyenvSandboxConfig or the name of an image")


def _open(settings: SkyenvSandboxConfig) -> tuple[ExitStack, Portal, Sandbox, str]:
    """A thread, a connection and a sandbox, owned by the stack."""
    spec: dict[str, Any] = {"ttl": 3600.0, **settings.limits}
    if settings.network != "none":
        spec["network"] = settings.network
    with ExitStack() as stack:
        portal = stack.enter_context(Portal())
        connecting = skyenv.connect(settings.url or os.environ.get(URL), os.environ.get(TOKEN))
        provider = stack.enter_context(portal.enter(connecting))
        box = stack.enter_context(portal.enter(provider.sandbox(settings.image, env=settings.env, **spec)))
        place = shlex.quote(settings.workdir)
        actor = portal.actor()
        made = actor.call(lambda: box.exec(f"mkdir -p {place} {STREAMS} && chmod 700 {STREAMS}"))
        actor.close()
        if made.exit_code:
            raise ConfigError(f"sandbox: workdir {settings.workdir!r} cannot be made: {made.output[-200:]}")
        owned = stack.pop_all()
    return owned, portal, box, settings.workdir


def _script(cmd: list[str], cwd: str, env: dict[str, str]) -> str:
    """A program in a process of its own, its streams in files; nothing of it is looked up as a builtin or an alias."""
    exports = "".join(f"export {name}={shlex.quote(value)} || exit; " for name, value in env.items())
    inside = f"cd {shlex.quote(cwd)} || exit; {exports}exec -- {shlex.join(cmd)}"
    return f"( {inside} ) <{STREAMS}/in >{STREAMS}/out 2>{STREAMS}/err"


Stream = tuple[str, bool]
"""What a stream held at its end, and whether that is not all."""


async def _exec(box: Sandbox, script: str, data: bytes, timeout: float, most: int) -> tuple[int, Stream, Stream]:
    """Status and both streams. TimeoutError when the time is up; then everything that it started was killed."""
    await box.write_file(f"{STREAMS}/in", data)
    try:
        result = await box.exec(script, timeout=timeout)
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True), anyio.move_on_after(INTERRUPT_SECONDS), contextlib.suppress(EnvError):
            await box.interrupt()
        raise
    if result.timed_out:
        raise TimeoutError(f"the command did not end within {timeout:g} s")
    return result.exit_code, await _stream(box, "out", most), await _stream(box, "err", most)


async def _stream(box: Sandbox, name: str, most: int) -> Stream:
    path = f"{STREAMS}/{name}"
    try:
        size = (await box.stat(path)).size
        data = await box.read_file(path, offset=max(0, size - most), max_bytes=most)
    except SandboxPathError:
        return "", False
    return data.decode("utf-8", "replace"), size > most
