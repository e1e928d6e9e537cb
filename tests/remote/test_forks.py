"""Snapshots, forks and rollbacks on a real node: layers come, get flat and go, and a kill in between leaves nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest
from node_processes import SERVE, served
from test_lifecycle import alive, children, eventually, launcher_of, names_in, remains, state_of, tree

from skyenv.errors import ConfigError, EnvError, NotCarried, SandboxError
from skyenv.remote.client import SandboxClient, connect


def layers_of(state: Path) -> list[str]:
    """Layers on disk, those that are being removed included."""
    folder = state / "layers"
    return [str(path) for path in folder.iterdir()] if folder.exists() else []


async def test_a_chain_of_snapshots_stays_flat_and_its_layers_go() -> None:
    with served(SERVE, "local") as (process, url):
        state = state_of(launcher_of(process.pid))
        async with connect(url, "secret") as client:
            async with client.sandbox() as box:
                await box.exec("mkdir -p d/old; for n in {1..30}; do echo $n > d/$n; done; echo keep > d/old/keep")
                first = await box.snapshot()
                for number in range(40):
                    await box.exec(f"echo {number} > last; rm -f d/{number}; mv d/old d/new && mv d/new d/old")
                    latest = await box.snapshot(shell=number % 2 == 0)
                    if number < 39:
                        await client.delete_snapshot(latest)
                await eventually(lambda: layers_of(state)[29:])
                async with client.sandbox(snapshot=latest) as twin, client.sandbox(snapshot=first) as early:
                    for each in (box, twin):
                        assert (await each.exec("cat last d/old/keep; ls d | wc -l")).output == "39\nkeep\n1\n"
                    assert (await early.exec("cat d/7 d/old/keep; ls | wc -l")).output == "7\nkeep\n1\n"
                    await client.delete_snapshot(latest)
                    assert (await twin.exec("mv d e; cat e/old/keep")).output == "keep\n"
            await client.delete_snapshot(first)
            await eventually(lambda: layers_of(state))


async def test_the_shell_of_a_snapshot_is_the_one_before(local_url: str) -> None:
    """What it holds that no copy could: its process, its jobs' numbers, a directory reached by a link."""
    async with connect(local_url, "secret") as client, client.sandbox() as box:
        await box.exec('mkdir -p real/deep; ln -s real link; cd link/deep; sleep 0 & wait; cd() { builtin cd "$@"; }')
        before = await box.exec("echo $$ $! $PWD; pwd -P; SECONDS=500")
        await box.snapshot()
        after = await box.exec("echo $$ $! $PWD; pwd -P; echo x > new; cd ..; pwd; ls deep; [ $SECONDS -ge 500 ]")
        assert after.output == before.output + "/root/link\nnew\n"
        assert after.exit_code == 0


async def test_a_posix_shell_carries_what_it_can_tell(local_url: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox(shell="sh") as box:
        await box.exec(
            "mkdir d; cd d; A='1  2'; export B='it'\\''s'; readonly C=3; umask 027; set -f; trap 'true' USR1"
        )
        async with box.fork() as twin:
            result = await twin.exec('echo "$A" "$B" $C; pwd; umask; echo *; trap; C=4')
            assert result.output.startswith("1  2 it's 3\n/root/d\n0027\n*\ntrap -- 'true' USR1\n"), result
            assert (await twin.exec("echo $B")).output == "it's\n"
        await box.exec("alias x=y")
        with pytest.raises(NotCarried, match="aliases"):
            await box.snapshot()


async def test_a_snapshot_of_a_silent_command_says_so(local_url: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox() as box:
        await box.exec("export A=1")
        assert (await box.exec("echo a; sleep 60", soft_timeout=0.2)).running
        with pytest.raises(NotCarried) as caught:
            await box.snapshot()
        assert isinstance(caught.value, EnvError)
        assert {"a running command", "the state of the shell, which is busy"} & set(caught.value.items)
        async with box.fork(shell=False) as twin:
            assert (await twin.exec("echo ${A-none}")).output == "none\n"
        assert (await box.interrupt()).exit_code == 130
        with pytest.raises(ConfigError, match="does not exist"):
            await box.rollback("0" * 32)
        assert (await box.exec("echo $A")).output == "1\n"


async def fork_until_lost(client: SandboxClient, forks: list[int]) -> None:
    """Take snapshots, roll back and start twins until the node is gone."""
    try:
        async with client.sandbox() as box:
            while True:
                await box.exec("date >> log; f() { :; }")
                async with box.fork(), box.fork(shell=False):
                    forks.append(1)
                    await box.rollback(await box.snapshot(), drop=True)
    except (SandboxError, EnvError):
        return


@pytest.mark.parametrize("victim", ["node", "launcher"])
async def test_a_kill_while_forking_leaves_nothing(victim: str) -> None:
    with served(SERVE, "local") as (process, url):
        launcher = launcher_of(process.pid)
        state, forks = state_of(launcher), list[int]()
        async with connect(url, "secret", patience=0.1) as client, anyio.create_task_group() as group:
            for _task in range(3):
                group.start_soon(fork_until_lost, client, forks)
            while len(forks) < 4:
                await anyio.sleep(0.01)
            names, pids = names_in(state), [launcher, *children(launcher), *tree(children(launcher))]
            os.kill(process.pid if victim == "node" else launcher, signal.SIGKILL)
        await eventually(lambda: alive(pids))
    await eventually(lambda: remains(state, names, pids))


@pytest.mark.parametrize(
    "change",
    [
        "mv /etc/ssl /etc/ssl2; ln -s /root /etc/ssl",
        "mv /root /root2; ln -s /etc /root",
        "chmod 700 /; chmod 0 /etc",
        "rm -rf /run /mnt /tmp /srv /etc 2>/dev/null; true",
    ],
)
async def test_whatever_a_session_did_to_its_root_it_can_be_forked(local_url: str, change: str) -> None:
    """Nothing is mounted through links that it made, and what was moved stays moved."""
    async with connect(local_url, "secret") as client, client.sandbox() as box:
        await box.exec(change)
        tell = "stat -c '%n %A %N' / /* /etc/*; ls -d /root/versions /etc/versions 2>/dev/null"
        async with box.fork() as twin, twin.fork() as second:
            here, there, further = [(await each.exec(tell)).output for each in (box, twin, second)]
        assert here == there == further


async def test_forks_of_a_group_share_one_snapshot_that_each_deletes_for_itself() -> None:
    with served(SERVE, "local") as (process, url):
        state = state_of(launcher_of(process.pid))
        async with connect(url, "secret") as client, client.sandbox() as box:
            await box.exec("echo 1 > a; v=1")
            names = [await box.snapshot() for _number in range(3)]
            assert len(set(names)) == 3
            assert len(layers_of(state)) == 1
            await client.delete_snapshot(names[0])
            await client.delete_snapshot(names[0])
            with pytest.raises(ConfigError, match="does not exist"):
                await box.rollback(names[0])
            await box.exec("echo 2 > a; v=2")
            later = await box.snapshot()
            for name, value in ((names[1], "1"), (names[2], "1"), (later, "2")):
                async with client.sandbox(snapshot=name) as twin:
                    assert (await twin.exec("cat a; echo $v")).output == f"{value}\n{value}\n"
                await client.delete_snapshot(name)
            with pytest.raises(ConfigError, match="does not exist"):
                async with client.sandbox(snapshot=names[1]):
                    pass


async def test_snapshots_outlive_a_node_server_that_is_killed(tmp_path: Path) -> None:
    home = str(tmp_path / "state")
    with served(SERVE, "local", home) as (first, url):
        port = url.rpartition(":")[2]
        async with connect(url, "secret", patience=30) as client, client.sandbox() as box:
            await box.exec("mkdir d; cd d; echo 1 > a; v=1")
            snapshot = await box.snapshot()
            await client.prefetch(count=2)
            await box.exec("echo 2 > a; v=2")
            first.kill()
            first.wait()
            with served(SERVE, "local", home, port):
                async with client.sandbox(snapshot=snapshot) as twin:
                    assert (await twin.exec("pwd; cat a; echo $v")).output == "/root/d\n1\n1\n"
                assert (await box.exec("cat a; echo $v")).output == "2\n2\n"
                await box.rollback(snapshot)
                assert (await box.exec("cat a; echo $v")).output == "1\n1\n"
                with anyio.fail_after(100):  # the warm ones of the first server are nobody's
                    while (await client.health())["sandboxes"] > 1:
                        await anyio.sleep(0.1)
