"""The seams, in one file: everything else implements one of these or connects them.

An `Env` owns what it opens and frees it in `aclose`. A `Sandbox` is handed to an environment by a `SandboxProvider`,
so environments never know whether the node server is in this process or far away. Engines and rewards are stateless
from the caller's view. Who closes what: whoever entered the `async with`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from skyenv.types import (
    Completion,
    ExecResult,
    FileInfo,
    Limits,
    Message,
    SamplingParams,
    Step,
    StopReason,
    ToolCall,
    ToolSpec,
    Trajectory,
)


@runtime_checkable
class Task(Protocol):
    """One problem, as data."""

    @property
    def task_id(self) -> str:
        """Unique within its task set."""
        ...


class FileOps(Protocol):
    """Files inside a sandbox, by absolute path; symlinks are resolved inside the sandbox only.

    Every method raises `SandboxPathError` with `errno` set for what a local file system would refuse.
    """

    async def stat(self, path: str) -> FileInfo:
        """Describe what `path` resolves to."""
        ...

    async def read_file(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """Read a regular file. Devices, sockets and FIFOs are refused, never opened."""
        ...

    async def write_file(self, path: str, data: bytes, *, expected: bytes | None = None) -> None:
        """Write atomically, parents created, mode and owner of an existing file kept.

        With `expected`, `SandboxConflict` unless the file holds exactly these bytes now.
        """
        ...

    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        """List entries below `path`, bytewise sorted, inner symlinks not followed, `path` itself left out."""
        ...

    async def remove(self, path: str) -> None:
        """Delete a regular file or a symlink."""
        ...


class Shell(Protocol):
    """The persistent shell of a sandbox: one command at a time, state carried over."""

    async def exec(
        self,
        command: str,
        *,
        timeout: float = 60.0,
        soft_timeout: float | None = None,
        max_output_bytes: int = 1 << 20,
        terminal: bool = False,
    ) -> ExecResult:
        """Run `command` in the session shell, at most `timeout` seconds, then interrupt and kill it.

        With `soft_timeout`, return with `running=True` when nothing new was printed for so many seconds; the command
        goes on until `timeout` and is followed with `poll`. Raises `EnvError` while an earlier command is running.
        On a `terminal` it runs in a shell of its own, which starts where the session is and changes nothing in it, and
        takes `send_input`.
        """
        ...

    async def poll(self, *, soft_timeout: float | None = None) -> ExecResult:
        """Wait for the running command as `exec` does; only output not returned before. `EnvError` when idle."""
        ...

    async def send_input(self, text: str, *, soft_timeout: float | None = None) -> ExecResult:
        """Type `text` as it is into the running command's terminal, then wait as `poll` does.

        A line ends with a newline; C-c is U+0003, C-d U+0004. `EnvError` when idle, when the command has no terminal,
        or when it does not read and the terminal is full.
        """
        ...

    async def interrupt(self) -> ExecResult:
        """Send SIGINT to the running command, SIGKILL when it does not end; returns how it ended."""
        ...


class Sandbox(FileOps, Shell, Protocol):
    """An isolated machine: files, a shell, and the means to take its state elsewhere. Not safe to share."""

    async def download(self, path: str, *, exclude: Sequence[str] = ()) -> bytes:
        """Return the tree below `path` as a tar; entries whose base name is in `exclude` are left out."""
        ...

    async def upload(self, path: str, archive: bytes) -> None:
        """Unpack a tar below `path` (created if missing); members that would land outside are refused."""
        ...

    async def kill_processes(self) -> None:
        """Kill everything that runs inside at once; files stay, the next command gets a fresh shell."""
        ...

    async def snapshot(self, *, shell: bool = True, drop: bool = False) -> str:
        """Keep the sandbox as it is; the id starts new ones through `SandboxProvider.sandbox`.

        With `shell`, the session travels with the files: directory, variables, functions, aliases, options. What cannot
        travel (processes besides the shell, descriptors that the session opened, a running command) raises `NotCarried`
        unless `drop`. Without `shell` only files travel, and nothing is refused. The sandbox itself goes on unchanged.
        """
        ...

    async def rollback(self, snapshot: str, *, drop: bool = False) -> None:
        """Put this sandbox back to a snapshot of its own or of another's: files, and session if that was kept.

        Whatever runs would end: `NotCarried` unless `drop`. ConfigError when there is no such snapshot.
        """
        ...

    async def tunnel(self, target: str, *, port: int = 0) -> int:
        """Let a port of the sandbox's loopback lead to `target`, HOST:PORT as the node sees it; returns the port.

        Port 0 picks a free one. It needs no network in the sandbox and opens none: connections to that port reach that
        address, until the sandbox ends or is rolled back. ConfigError when the node does not allow the target.
        """
        ...

    def fork(self, *, shell: bool = True, drop: bool = False) -> AbstractAsyncContextManager[Sandbox]:
        """Start a twin from a `snapshot` of this sandbox that lasts until the twin has started."""
        ...


class SandboxProvider(Protocol):
    """Where sandboxes come from: a client of a node server. Open until the `async with` that made it ends."""

    def sandbox(
        self,
        image: str | None = None,
        *,
        snapshot: str | None = None,
        env: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox; leaving the block deletes it. Raises `SandboxUnavailable` when none can be had."""
        ...

    async def delete_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot; sandboxes that were started from it live on. Unknown ids are ignored."""
        ...


@runtime_checkable
class WarmProvider(Protocol):
    """A provider that can be told in advance what will be opened. Optional."""

    async def prefetch(
        self,
        image: str | None = None,
        *,
        snapshot: str | None = None,
        env: Mapping[str, str] | None = None,
        count: int = 0,
        **spec: Any,
    ) -> None:
        """Have `count` sandboxes ready for those who open ones with the same arguments; returns at once."""
        ...


class Engine(Protocol):
    """An inference engine: token ids in, sampled ids and their logprobs out."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """Sample one completion. Safe to call concurrently; cancelling the call aborts the request.

        `messages` are the same conversation as text, for servers that take no ids; `session_id` is stable over a
        trajectory, for routing. Raises `EngineError`.
        """
        ...


@runtime_checkable
class Tool(Protocol):
    """A tool of an environment. Whatever the model does wrong is an answer, not an exception."""

    spec: ToolSpec

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Run one call with arguments that passed the schema; returns what the model sees."""
        ...


Reward = Callable[[Trajectory], float | None]
"""A trajectory with its verdict in, its reward out; None leaves the sample out of training."""


class Env(ABC):
    """A multi-turn environment; one instance runs one episode at a time.

    Phases: `areset` (init), `astep` until `terminated` or `truncated` (run), `aevaluate` (eval), `aclose`. Actions
    are tool calls; a mistake of the model comes back as an observation.
    """

    @property
    @abstractmethod
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that an action may name."""

    @property
    @abstractmethod
    def prompt(self) -> tuple[Message, ...]:
        """System and task messages of the current episode. Raises `ResetNeeded` before `areset`."""

    @abstractmethod
    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode; `options={"task": task_or_id}` chooses the task, else the seed does."""

    @abstractmethod
    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        """Run one action. Raises `ResetNeeded` before `areset` and after the episode's end."""

    @abstractmethod
    async def aevaluate(self) -> tuple[float | None, dict[str, Any]]:
        """Grade what the episode left behind: reward (None: not valid for training) and verdict. Idempotent."""

    @abstractmethod
    async def aclose(self) -> None:
        """Free everything; idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@runtime_checkable
class SelfPlayed(Protocol):
    """An environment that plays its episodes itself, by an agent program of its own that asks the engine."""

    async def aplay(
        self, engine: Engine, renderer: Any, trajectory: Trajectory, limits: Limits, sampling: SamplingParams
    ) -> StopReason:
        """Play one episode after `areset`; fills segments and turns of `trajectory` and returns why it ended.

        `renderer` is a `skyenv.renderer.Renderer`. What was said before an exception or a cancellation stays in the
        trajectory. Raises EngineError, SandboxError, and EnvError for an agent that does not start.
        """
        ...


MakeEnv = Callable[[], Env]
"""Makes a fresh environment for one trajectory."""


class Beginning(Protocol):
    """How one environment begins among its siblings: from what one of them prepared, or by preparing it for all."""

    @property
    def snapshot(self) -> str | None:
        """The sandbox snapshot to start from; None: there is none, prepare as if alone."""
        ...

    @property
    def wanted(self) -> bool:
        """Whether the siblings wait for this one to `offer` or to `decline`."""
        ...

    def offer(self, snapshot: str, free: Callable[[], Awaitable[None]]) -> None:
        """Let the siblings start from `snapshot`; whoever runs the group awaits `free` when all of it is through."""
        ...

    def decline(self) -> None:
        """Nothing can be shared, or the snapshot is spoilt: from now on everyone of the group prepares alone."""
        ...


@runtime_checkable
class SharesBeginning(Protocol):
    """An environment whose siblings can start from one prepared sandbox. Optional."""

    def begin_with(self, beginning: Beginning) -> None:
        """How the next `areset` begins; during it `offer` or `decline` is called where `wanted`."""
        ...


@runtime_checkable
class GradesAhead(Protocol):
    """An environment that can open what its evaluation needs while the episode still goes on. Optional."""

    async def aprepare_evaluation(self) -> None:
        """Called beside `astep`; may be cancelled or raise at no cost but time. `aevaluate` or `aclose` frees it."""
        ...


@runtime_checkable
class Prefetches(Protocol):
    """An environment that can have sandboxes and files ready for episodes to come. Optional."""

    async def aprefetch(self, tasks: Sequence[Task | str], count: int) -> None:
        """Get ready to open `count` sandboxes of each task. Holds nothing open itself."""
        ...
