"""Rows of commands that break persistent shells elsewhere, and how one is run on a node."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from skyenv.remote.client import RemoteSandbox, connect
from skyenv.types import ExecResult

PATIENCE = 60.0
ENDING = 60.0
"""Seconds, on the slowest machine, for a command that must answer and for ending one whose time is up."""


@dataclass(frozen=True)
class Run:
    """A command, and what it must come to; None means: whatever. What it leaves running would take far longer."""

    command: str
    output: str | Callable[[str], bool] | None = None
    code: int | None = 0
    timeout: float = PATIENCE
    restarted: bool = False
    timed_out: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# What was killed may take a moment to be gone; what was not sleeps for minutes.
NO_SLEEP = Run("while ps -e | grep -q '[s]leep'; do :; done")


def check(run: Run, result: ExecResult) -> None:
    if callable(run.output):
        assert run.output(result.output), result
    elif run.output is not None:
        assert result.output == run.output, result
    if run.code is not None:
        assert result.exit_code == run.code, result
        assert result.session_restarted == run.restarted, result
        assert result.timed_out == run.timed_out, result
    assert result.seconds < run.timeout + ENDING, result
    assert not result.running


@asynccontextmanager
async def session(url: str, **options: Any) -> AsyncIterator[RemoteSandbox]:
    """A sandbox whose session must answer whatever the block did to it."""
    async with connect(url, "secret") as client, client.sandbox(**{"pids": 256, **options}) as box:
        yield box
        alive = await box.exec("echo alive", timeout=PATIENCE)
        assert alive.output.endswith("alive\n"), alive
        assert not alive.timed_out


async def run_all(url: str, runs: list[Run], **options: Any) -> None:
    async with session(url, **options) as box:
        for run in runs:
            check(run, await box.exec(run.command, timeout=run.timeout, **run.options))


@asynccontextmanager
async def raw_sandbox(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A sandbox without our client: requests as they are on the wire, and the path of what was made."""
    path = f"/sandboxes/{uuid.uuid4().hex}"
    async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer secret"}, timeout=100) as http:
        made = await http.put(path, content="{}")
        assert made.status_code == 200, made.text
        yield http, path
        alive = await http.post(
            f"{path}/exec?timeout={PATIENCE}", content="echo alive", headers={"idempotency-key": "alive"}
        )
        assert alive.content == b"alive\n"
        await http.delete(path)


async def let_go(http: httpx.AsyncClient, path: str) -> None:
    """Make the file /tmp/go, which a command there waits for."""
    made = await http.put(f"{path}/file?path=/tmp/go", content="", headers={"idempotency-key": "go"})
    assert made.status_code == 200, made.text
