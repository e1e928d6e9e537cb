"""The node's side of the launcher process: start it, ask it, end it. Also the state directory and its sweeping.

The launcher removes its state directory itself, however this process ends; a directory whose launcher was killed too
is swept by the next node (its lock is free then, which is never true of a live one). With a `home`, a directory that
the user names, the launcher survives this process if that does not end in order, and the next one with the same home
takes over what it holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread

from skyenv.errors import ConfigError, SandboxLost, SandboxUnavailable
from skyenv.remote.backends import Held, Record, Stats
from skyenv.remote.channel import Channel
from skyenv.remote.inside import contain, doorstep
from skyenv.remote.inside.cgroups import RECORD, Group, Hierarchy
from skyenv.remote.inside.wire import Frame
from skyenv.remote.tasks import background_tasks

CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.{module} import main; main()"
PREFIX = "skyenv-"
CLOSE_TIMEOUT = 20.0
GROUPS_TIMEOUT = 2.0
FREEZE_TIMEOUT = 10.0
ADOPT_TIMEOUT = 30.0


def command(module: str, *arguments: str) -> list[str]:
    """How to run a module of `skyenv.remote.inside` as a program of its own, without anybody's site-packages."""
    folder = str(Path(__file__).parent.parent)
    return [sys.executable, "-I", "-S", "-c", CODE.format(module=module), folder, *arguments]


def environment() -> dict[str, str]:
    """All that such a program gets to know of this process's environment."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def make_state(base: Path, owner: int | None) -> Path:
    """A fresh state directory below `base`, after sweeping what dead nodes left there."""
    sweep(base)
    state = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    if owner is not None:
        os.chown(state, owner, owner)
    return state


def sweep(base: Path) -> None:
    """Remove state directories of this user whose launcher is gone, and the control groups of their sandboxes."""
    for state in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            ours = state.lstat().st_uid == os.geteuid()
            if ours and is_abandoned(state / "lock") and _sweep_groups(state):
                shutil.rmtree(state, ignore_errors=True)


def _sweep_groups(state: Path) -> bool:
    """Remove the sandboxes' control groups; False while something still ends in one, so that a later sweep does it."""
    record = state / RECORD
    parents = json.loads(record.read_text()) if record.exists() else []
    hierarchies = [Hierarchy(version, parent, tuple(names)) for version, parent, names in parents]
    names = [sandbox.name for sandbox in state.iterdir()]
    for name in names:
        contain.end_left(str(state / name))
    removed = [_remove_group(Group.of(hierarchies, name)) for name in names]
    return all(removed)


def _remove_group(group: Group) -> bool:
    with contextlib.suppress(OSError):
        group.freeze(False)  # version 1 lets nothing frozen die
    return group.remove()


def _clean_up_after(state: Path) -> None:
    """Do what a launcher that was killed could not do; nothing when it ended by itself."""
    deadline = time.monotonic() + GROUPS_TIMEOUT
    while state.exists() and not _sweep_groups(state) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(state, ignore_errors=True)


def is_abandoned(lock: Path) -> bool:
    """Whether no launcher holds the lock of a state directory any more. OSError when there is none."""
    file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


class Launcher:
    """A running launcher, with what it held when it was reached. Made by `launch`.

    `kept` is what the backend had it `keep`, `config` what it was started with.
    """

    def __init__(self, channel: Channel, held: list[Held], kept: dict[str, Any], config: dict[str, Any]) -> None:
        self._channel = channel
        self.held = held
        self.kept = kept
        self.config = config

    async def ask(
        self, header: dict[str, Any], fds: tuple[int, ...] = (), payload: bytes = b"", *, timeout: float = 60.0
    ) -> Frame:
        """One request. SandboxUnavailable when it fails, SandboxLost when the launcher is gone."""
        frame = await self._channel.request(header, payload, fds, timeout=timeout)
        if error := frame.header.get("error"):
            raise SandboxUnavailable(f"{header['op']}: {error}")
        return frame

    async def create(self, request: dict[str, Any], record: Record) -> socket.socket:
        """Fork a sandbox; returns the socket to its init. SandboxUnavailable with the reason when it fails."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            try:
                await self.ask({"op": "create", **request, "record": record}, (theirs.fileno(),))
            except SandboxUnavailable as error:
                theirs.close()
                raise SandboxUnavailable(await _last_words(ours) or str(error)) from error
            except SandboxLost as error:
                raise SandboxUnavailable(f"the launcher of this node is gone: {error}") from error
            finally:
                theirs.close()
            stack.pop_all()
        return ours

    async def keep(self, facts: dict[str, Any]) -> None:
        """Have the launcher remember facts by key for the next node; a value of None forgets one."""
        await self.ask({"op": "keep", "keep": facts})

    async def attach(self, sandbox: str) -> socket.socket:
        """A fresh socket to the init of a sandbox. SandboxLost when it does not live."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            try:
                await self.ask({"op": "attach", "name": sandbox}, (theirs.fileno(),))
            except SandboxUnavailable as error:
                raise SandboxLost(str(error)) from error
            finally:
                theirs.close()
            stack.pop_all()
        return ours

    async def freeze(self, sandbox: str, frozen: bool) -> None:
        """Freeze or thaw. SandboxUnavailable when something inside does not stop; it goes on then."""
        header = {"op": "freeze", "name": sandbox, "frozen": frozen}
        with anyio.move_on_after(FREEZE_TIMEOUT):
            done = False
            while not done:  # the kernel tells nobody when the last one has stopped
                done = (await self.ask(header)).header["done"]
                await anyio.sleep(0 if done else 0.001)
            return
        with anyio.CancelScope(shield=True):
            await self.ask({**header, "frozen": False})
        raise SandboxUnavailable(f"the sandbox could not be {'frozen' if frozen else 'thawed'}")


class Home(NamedTuple):
    """A directory of a server and, should that be killed, for how many seconds its sandboxes wait for the next one."""

    path: Path
    patience: float = 60.0


class LauncherBackend:
    """What all backends have in common whose sandboxes a launcher forks. They set `_launcher` inside `open`."""

    _launcher: Launcher | None = None

    @property
    def _running(self) -> Launcher:
        if self._launcher is None:
            raise ConfigError("the backend is not open")
        return self._launcher

    def held(self) -> list[Held]:
        """See `Backend.held`."""
        return self._running.held

    async def attach(self, sandbox: str) -> socket.socket:
        """See `Backend.attach`."""
        return await self._running.attach(sandbox)

    async def note(self, sandbox: str, record: Record) -> None:
        """See `Backend.note`."""
        await self._running.ask({"op": "note", "name": sandbox, "record": record})

    async def stats(self, sandbox: str) -> Stats:
        """See `Backend.stats`."""
        return Stats(**(await self._running.ask({"op": "stats", "name": sandbox})).header["usage"])

    async def freeze(self, sandbox: str) -> None:
        """See `Backend.freeze`."""
        await self._running.freeze(sandbox, True)

    async def thaw(self, sandbox: str) -> None:
        """See `Backend.thaw`."""
        await self._running.freeze(sandbox, False)


async def _last_words(sock: socket.socket) -> str:
    """Why a sandbox could not be set up, as its first process told before it ended."""
    channel = Channel(sock)
    with anyio.move_on_after(1.0):
        await channel.serve()
    return channel.last_words


@contextlib.asynccontextmanager
async def launch(
    backend: str, prepare: Callable[[], Awaitable[dict[str, Any]]], home: Home | None
) -> AsyncIterator[Launcher]:
    """A launcher for the block; after it nothing is left. `prepare` makes the configuration when one is started.

    ConfigError when another server uses `home`, or when what is held there is not ours to take over.
    """
    async with contextlib.AsyncExitStack() as stack:
        common = {"backend": backend, "doorstep": None, "patience": 0.0}
        if home is None:
            launcher = await _start({**await prepare(), **common}, stack)
        else:
            common |= {"doorstep": str(home.path), "patience": home.patience}
            async with _starting(home.path):
                adopted = await _adopt(home.path, backend, stack)
                launcher = adopted or await _start({**await prepare(), **common}, stack)
        yield launcher


@contextlib.asynccontextmanager
async def _starting(home: Path) -> AsyncIterator[None]:
    """One server at a time looks for a launcher and starts one."""
    lock = await anyio.to_thread.run_sync(_open_home, home)
    try:
        await anyio.to_thread.run_sync(fcntl.flock, lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _open_home(home: Path) -> int:
    """The lock of a home, which is made if it is missing. ConfigError when others may enter it."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if home.stat().st_mode & 0o077:
            raise ConfigError(f"state {home}: other users may enter it; chmod 700 it or choose another directory")
        return os.open(home / "starting", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"state {home}: {error.strerror}") from error


@contextlib.asynccontextmanager
async def _serving(channel: Channel) -> AsyncIterator[None]:
    """Hand out replies for the block, even when it is being cancelled."""

    async def serve() -> None:
        with anyio.CancelScope(shield=True):
            await channel.serve()

    async with background_tasks() as group:
        group.start_soon(serve)
        try:
            yield
        finally:
            channel.close("the node is closing")


@contextlib.asynccontextmanager
async def _ending(channel: Channel, config: dict[str, Any]) -> AsyncIterator[None]:
    """Afterwards the launcher is told not to wait for another node, and is gone."""
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            if config["doorstep"] is not None:
                with contextlib.suppress(SandboxLost):
                    await channel.request({"op": "end"}, timeout=CLOSE_TIMEOUT)


async def _adopt(home: Path, backend: str, stack: contextlib.AsyncExitStack) -> Launcher | None:
    """The launcher that a former server left in `home`, if it still lives."""
    sock = _knock(home)
    if sock is None:
        return None
    channel = Channel(sock)
    await stack.enter_async_context(_serving(channel))
    try:
        wish = {"op": "adopt", "version": doorstep.VERSION, "backend": backend}
        answer = (await channel.request(wish, timeout=ADOPT_TIMEOUT)).header
    except SandboxLost as error:
        if channel.last_words:
            raise ConfigError(f"state {home}: {channel.last_words}") from error
        return None
    config = answer["config"]
    stack.push_async_callback(anyio.to_thread.run_sync, _clean_up_after, Path(config["state"]))
    await stack.enter_async_context(_ending(channel, config))
    return Launcher(channel, [Held(*each) for each in answer["held"]], answer["kept"], config)


def _knock(home: Path) -> socket.socket | None:
    where = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(f"/proc/self/fd/{where}/{doorstep.NAME}")
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    finally:
        os.close(where)
    return sock


async def _start(config: dict[str, Any], stack: contextlib.AsyncExitStack) -> Launcher:
    """A new launcher."""
    ours, theirs = socket.socketpair()
    process = await anyio.open_process(
        command("launcher", str(theirs.fileno())),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=None,
        env=environment(),
        start_new_session=True,
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    channel = Channel(ours)
    stack.push_async_callback(_bury, process, Path(config["state"]))
    await stack.enter_async_context(_serving(channel))
    await stack.enter_async_context(_ending(channel, config))
    if process.stdin is not None:
        await process.stdin.send(json.dumps(config).encode())
        await process.stdin.aclose()
    launcher = Launcher(channel, [], {}, config)
    await launcher.ask({"op": "ping"})
    return launcher


async def _bury(process: anyio.abc.Process, state: Path) -> None:
    """The launcher ends by itself and takes everything along; one that does not is killed."""
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(CLOSE_TIMEOUT) as scope:
            await process.wait()
        if scope.cancelled_caught:
            process.kill()
            await process.wait()
        await anyio.to_thread.run_sync(_clean_up_after, state)
