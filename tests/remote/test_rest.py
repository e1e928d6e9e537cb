"""Pausing, idle sandboxes, what they use, and output as it comes."""

from __future__ import annotations

import itertools

import anyio
import pytest

from skyenv.errors import SandboxLost, SandboxPathError
from skyenv.remote.client import RemoteSandbox, connect
from skyenv.types import ExecResult


async def until_frozen(box: RemoteSandbox, wanted: bool = True) -> None:
    with anyio.fail_after(100):
        while (await box.stats()).frozen != wanted:
            await anyio.sleep(0.05)


async def until_there(box: RemoteSandbox, path: str) -> None:
    with anyio.fail_after(100):
        while True:
            try:
                await box.stat(path)
            except SandboxPathError:
                await anyio.sleep(0.02)
            else:
                return


@pytest.fixture(params=["local_url", "rootless_url", "process_url"])
def any_url(request: pytest.FixtureRequest) -> str:
    """With a freezer, and by signals."""
    url: str = request.getfixturevalue(request.param)
    return url


async def test_nothing_moves_in_a_paused_sandbox(any_url: str) -> None:
    async with connect(any_url, "secret") as client, client.sandbox() as box:
        await box.exec("while sleep 0.02; do date +%s.%N; done > ticks & until [ -s ticks ]; do sleep 0.02; done")
        for _again in range(2):
            await box.pause()
        assert (await box.stats()).frozen
        await anyio.sleep(1.0)
        await box.resume()
        assert not (await box.stats()).frozen
        await box.pause()
        count = "$(wc -l < ticks)"  # what is asked lets it go on
        more = await box.exec(f"n={count}; until [ {count} -gt $n ]; do sleep 0.02; done; kill %1; cat ticks")
        ticks = more.output.split()
        assert not (await box.stats()).frozen
    moments = [float(tick) for tick in ticks]
    assert max(after - before for before, after in itertools.pairwise(moments)) > 0.95


@pytest.mark.parametrize("url", ["local_url", "rootless_url"])
async def test_a_pause_does_not_count_against_a_running_command(url: str, request: pytest.FixtureRequest) -> None:
    async with connect(request.getfixturevalue(url), "secret") as client, client.sandbox() as box:
        results: list[ExecResult] = []

        async def work() -> None:
            command = "touch begun; until [ -e go ]; do sleep 0.05; done; echo done"
            results.append(await box.exec(command, timeout=8.0))

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await until_there(box, "/root/begun")
            await box.pause()
            await anyio.sleep(8.0)
            assert not results
            await box.resume()
            await box.write_file("/root/go", b"")
        assert (results[0].outcome, results[0].output) == ("exit", "done\n")
        assert results[0].seconds < 8.0


async def test_an_idle_sandbox_is_frozen_until_it_is_needed(local_url: str) -> None:
    async with connect(local_url, "secret") as client:
        async with client.sandbox(freeze_after=1.0) as box, client.sandbox(freeze_after=None) as other:
            serve = "python3 -m http.server 8000 >/dev/null 2>&1 &"
            await box.exec(serve)
            await other.exec(serve)
            fetch = "for i in $(seq 100); do curl -sf localhost:8000 >/dev/null && break; sleep 0.1; done; echo $?"
            assert (await box.exec(fetch)).output == "0\n"
            await until_frozen(box)
            assert (await box.exec("curl -sf localhost:8000 > /dev/null; echo $?")).output == "0\n"
            await until_frozen(box)
            assert (await box.read_file("/etc/hostname")) == b"sandbox\n"
            await until_frozen(box)
            assert not (await other.stats()).frozen


async def test_work_is_not_idle(local_url: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox(freeze_after=1.0) as box:
        await box.exec("sh -c 'while :; do :; done; true' & ")
        await anyio.sleep(2.0)
        assert not (await box.stats()).frozen
        await box.exec("kill %1")
        await until_frozen(box)
        started = await box.exec("until [ -e go ]; do sleep 0.05; done; echo done", soft_timeout=0.1)
        assert started.running
        await anyio.sleep(1.8)
        assert not (await box.stats()).frozen
        await box.write_file("/root/go", b"")
        assert (await box.poll()).output == "done\n"


async def test_a_frozen_sandbox_is_deleted_and_its_lease_ends(local_url: str) -> None:
    async with connect(local_url, "secret") as client:
        async with client.sandbox() as box:
            await box.exec("sleep 600 &")
            await box.pause()
        with pytest.raises(SandboxLost):
            await box.exec("true")


async def test_stats(local_url: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox(disk_bytes=64 << 20) as box:
        before = await box.stats()
        await box.exec("sleep 600 & head -c 20000000 /dev/zero > /root/file; for i in $(seq 30000); do :; done")
        after = await box.stats()
        assert before.memory_bytes is not None
        assert after.memory_bytes is not None
        assert (before.cpu_seconds or 0) < (after.cpu_seconds or 0)
        assert (before.pids or 0) < (after.pids or 0) < 64
        assert (after.disk_bytes or 0) - (before.disk_bytes or 0) >= 20_000_000
        assert after.oom_kills == 0
        assert not after.frozen


async def test_output_comes_while_the_command_runs(any_url: str) -> None:
    async with connect(any_url, "secret") as client, client.sandbox() as box:
        home = (await box.exec("pwd")).cwd
        wait = "until [ -e {} ]; do sleep 0.02; done"
        command = rf"printf 'caf\303'; {wait.format('one')}; printf '\251 '; {wait.format('two')}; echo done; exit 3"
        pieces, seen = [], ""
        async for piece in box.stream(command, flush=0.0):
            pieces.append(piece)
            seen += piece.output
            if seen in ("caf", "café "):  # it goes on once this came
                await box.write_file(f"{home}/{'one' if seen == 'caf' else 'two'}", b"")
        assert seen == "café done\n"
        assert [piece.running for piece in pieces] == [True] * (len(pieces) - 1) + [False]
        assert len(pieces) >= 3
        assert pieces[-1].exit_code == 3
        quick = [piece async for piece in box.stream("echo all at once")]
        assert [(piece.output, piece.running) for piece in quick] == [("all at once\n", False)]


async def test_outcomes(local_url: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox(memory_bytes=64 << 20) as box:
        assert (await box.exec("exit 3")).outcome == "exit"
        assert (await box.exec("sleep 60", timeout=0.5)).outcome == "timeout"
        assert (await box.exec("head -c 200m /dev/zero | tail -c 190m | wc -c")).outcome == "oom"
        assert (await box.exec("kill -9 $$")).outcome == "killed"
        assert (await box.exec("sleep 60", soft_timeout=0.1)).outcome == "running"
        await box.kill_processes()
        assert (await box.poll()).outcome == "killed"
