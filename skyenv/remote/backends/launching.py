"""The node's side of the launcher process: start it, ask it, end it. Also the state directory and its sweeping.

The launcher removes its state directory itself, however this process ends; a directory whose launcher was killed too
is swept by the next node (its lock is free then, which is never true of a live one).
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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from skyenv.errors import SandboxLost, SandboxUnavailable
from skyenv.remote.channel import Channel
from skyenv.remote.inside.cgroups import RECORD
from skyenv.remote.tasks import background_tasks

CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.{module} import main; main()"
PREFIX = "skyenv-"
CLOSE_TIMEOUT = 20.0
GROUPS_TIMEOUT = 2.0


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
            if ours and _is_abandoned(state / "lock") and _sweep_groups(state):
                shutil.rmtree(state, ignore_errors=True)


def _sweep_groups(state: Path) -> bool:
    """Remove the sandboxes' control groups; False while something still ends in one, so that a later sweep does it."""
    record = state / RECORD
    parents = json.loads(record.read_text()) if record.exists() else []
    groups = [Path(parent, sandbox.name) for parent in parents for sandbox in state.iterdir()]
    for group in groups:
        with contextlib.suppress(OSError):
            group.rmdir()
    return not any(group.is_dir() for group in groups)


def _clean_up_after(state: Path) -> None:
    """Do what a launcher that was killed could not do; nothing when it ended by itself."""
    deadline = time.monotonic() + GROUPS_TIMEOUT
    while state.exists() and not _sweep_groups(state) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(state, ignore_errors=True)


def _is_abandoned(lock: Path) -> bool:
    file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


class Launcher:
    """A running launcher. Made by `launch`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def ask(self, header: dict[str, Any], fds: tuple[int, ...] = (), *, timeout: float = 60.0) -> None:
        """One request. SandboxUnavailable when it fails, SandboxLost when the launcher is gone."""
        frame = await self._channel.request(header, fds=fds, timeout=timeout)
        if error := frame.header.get("error"):
            raise SandboxUnavailable(f"{header['op']}: {error}")

    async def create(self, request: dict[str, Any]) -> socket.socket:
        """Fork a sandbox; returns the socket to its init. SandboxUnavailable with the reason when it fails."""
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            try:
                await self.ask({"op": "create", **request}, (theirs.fileno(),))
            except SandboxUnavailable as error:
                theirs.close()
                raise SandboxUnavailable(await _last_words(ours) or str(error)) from error
            except SandboxLost as error:
                raise SandboxUnavailable(f"the launcher of this node is gone: {error}") from error
            finally:
                theirs.close()
            stack.pop_all()
        return ours


async def _last_words(sock: socket.socket) -> str:
    """Why a sandbox could not be set up, as its first process told before it ended."""
    channel = Channel(sock)
    with anyio.move_on_after(1.0):
        await channel.serve()
    return channel.last_words


@contextlib.asynccontextmanager
async def launch(config: dict[str, Any]) -> AsyncIterator[Launcher]:
    """Run a launcher for the block; afterwards nothing that it started is left."""
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
    try:
        if process.stdin is not None:
            await process.stdin.send(json.dumps(config).encode())
            await process.stdin.aclose()
        async with background_tasks() as group:
            group.start_soon(channel.serve)
            try:
                launcher = Launcher(channel)
                await launcher.ask({"op": "ping"})
                yield launcher
            finally:
                channel.close("the node is closing")
    finally:
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CLOSE_TIMEOUT) as scope:
                await process.wait()
            if scope.cancelled_caught:
                process.kill()
                await process.wait()
            await anyio.to_thread.run_sync(_clean_up_after, Path(config["state"]))
