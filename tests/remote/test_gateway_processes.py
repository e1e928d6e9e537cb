"""Gateways and nodes that are killed, restarted and drained while clients work; docs/serving.md as it stands there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from fleet_processes import Fleet, fleet_in, nodes_known

from skyenv.errors import SandboxPathError, SandboxUnavailable
from skyenv.remote.client import connect
from tests.ports import free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
BLOCK = re.compile(r"<!-- (\w+)(?: (\S+))? -->\n```\w+\n(.*?)```", re.DOTALL)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_in(tmp_path) as fleet:
        yield fleet


class Page:
    """The page's blocks, run in a folder: `run`, `write FILE`, `start NAME` in the background."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = PAGE.read_text()
        for port in ("8764", "8771", "8772"):
            self.text = self.text.replace(port, str(free_port()))
        self.running: dict[str, subprocess.Popen[str]] = {}
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, command in (("skyenv", "-m skyenv.cli"), ("python", "")):
            script = bin_folder / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            script.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}

    def block(self, kind: str, name: str | None = None) -> str:
        (found,) = [code for its, what, code in BLOCK.findall(self.text) if its == kind and (what or None) == name]
        return str(found)

    def run(self) -> None:
        subprocess.run(["sh", "-ec", self.block("run")], cwd=self.folder, env=self.environment, check=True)

    def write(self, name: str) -> None:
        (self.folder / name).write_text(self.block("write", name))

    def start(self, name: str) -> str:
        """Start a block's command; returns the first line that it prints."""
        command = ["sh", "-c", f"exec {self.block('start', name).strip()}"]
        process = self.running[name] = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process.stdout.readline()

    def finish(self) -> list[int]:
        """Interrupt what runs, the gateway last; the statuses."""
        statuses = []
        for name in sorted(self.running, key=lambda name: name == "gateway"):
            process = self.running.pop(name)
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            process.stdout.close()
            statuses.append(process.wait(timeout=300))
        return statuses


@pytest.mark.slow
def test_the_page_about_serving(tmp_path: Path) -> None:
    page = Page(tmp_path)
    try:
        page.run()
        page.write("work.py")
        for server in ("gateway", "one", "two"):
            assert " at http://127.0.0.1:" in page.start(server)
        first = page.start("work")
        work = page.running.pop("work")
        assert work.stdout is not None
        seen = [first]
        while not {"one", "two"} <= {line.split()[-1] for line in seen}:
            seen.append(work.stdout.readline())
            assert seen[-1]
        assert "kill -9" in page.block("kill", "one")
        page.running.pop("one").kill()
        rest = work.communicate(timeout=300)[0].splitlines()
        assert work.returncode == 0
        assert rest[-1] == "24 pieces of work are done"
        assert any("starts over" in line for line in rest)
        assert " at http://127.0.0.1:" in page.start("one")
    finally:
        assert page.finish() == [0, 0, 0]


def test_the_configuration_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(tmp_path)
    page.run()
    page.write("node.yaml")
    with fleet_in(tmp_path / "bin") as fleet:
        monkeypatch.chdir(tmp_path)
        assert fleet.start("node", "serve", "--config", "node.yaml", "--slots", "3").startswith("http://")
        token = (tmp_path / "tokens").read_text().split()[1]

        async def slots() -> int:
            async with connect(fleet.urls["node"], token) as client:
                return int((await client.health())["max_sandboxes"])

        assert anyio.run(slots) == 3


@pytest.mark.slow
async def test_a_gateway_that_is_killed_loses_and_repeats_nothing(fleet: Fleet) -> None:
    """G4: a hundred commands while the gateway dies twice; each runs once."""
    fleet.gateway()
    fleet.node("one")
    fleet.node("two")
    async with connect(fleet.url) as client:
        await nodes_known(client, 2)
        finished: list[int] = []

        async def work(number: int) -> None:
            async with client.sandbox() as box:
                for step in range(10):
                    result = await box.exec(f"echo {step} >> log; sleep 0.2; echo {number}.{step}")
                    assert result.output == f"{number}.{step}\n"
                    finished.append(number)
                assert (await box.exec("cat log")).output.split() == [str(step) for step in range(10)]

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(work, number)
            for after in (20, 60):
                with anyio.fail_after(100):
                    while len(finished) < after:
                        await anyio.sleep(0.02)
                await anyio.to_thread.run_sync(fleet.end, "gateway", signal.SIGKILL)
                await anyio.to_thread.run_sync(fleet.gateway)
        assert len(finished) == 100


@pytest.mark.slow
async def test_a_node_that_is_restarted_takes_its_sandboxes_up_again(fleet: Fleet) -> None:
    """Killed in the middle of a command, started again elsewhere with its state: the client notices a pause."""
    fleet.gateway()
    state = ("--state", str(fleet.folder / "state"))
    fleet.node("one", *state, backend="local")
    async with connect(fleet.url) as client:
        await nodes_known(client, 1)
        async with client.sandbox() as box, anyio.create_task_group() as group:
            assert (await box.exec("export KEPT=yes; cd /usr")).exit_code == 0
            results = []

            async def command() -> None:
                results.append(
                    await box.exec("echo run >> /tmp/log; sleep 2; echo $KEPT $PWD; cat /tmp/log", timeout=60)
                )

            group.start_soon(command)
            with anyio.fail_after(100):
                while True:
                    try:
                        await box.stat("/tmp/log")
                        break
                    except SandboxPathError:
                        await anyio.sleep(0.02)
            await anyio.to_thread.run_sync(fleet.end, "one", signal.SIGKILL)
            await anyio.to_thread.run_sync(lambda: fleet.node("one", *state, backend="local"))
        assert [(each.exit_code, each.output) for each in results] == [(0, "yes /usr\nrun\n")]


async def test_two_gateways_serve_the_same_sandboxes(fleet: Fleet) -> None:
    fleet.gateway()
    second = fleet.gateway(name="second")
    fleet.node("one", "--gateway", second)
    async with connect(fleet.url, patience=1) as client, connect(second) as other:
        await nodes_known(client, 1)
        await nodes_known(other, 1)
        async with client.sandbox() as box:
            folder = (await box.exec("echo shared > f; pwd")).cwd
            headers = {"skyenv-sandbox-token": box.secret}
            found = await other.fetch(f"/sandboxes/{box.name}/file", headers=headers, path=f"{folder}/f")
            assert found.content == b"shared\n"
            fleet.end("gateway")
            assert (await other.health())["nodes"] == 1


async def test_sigterm_drains_first(fleet: Fleet) -> None:
    fleet.gateway()
    fleet.node("one", "--drain-timeout", "60")
    async with connect(fleet.url, patience=1) as client:
        await nodes_known(client, 1)
        async with client.sandbox() as box:
            node = fleet.running["one"]
            node.send_signal(signal.SIGTERM)
            with anyio.fail_after(100):
                while not (await client.fetch("/nodes", headers={})).json()[0]["draining"]:
                    await anyio.sleep(0.05)
            with pytest.raises(SandboxUnavailable) as caught:
                async with client.sandbox():
                    pass
            assert caught.value.reason in ("draining", "no_nodes")
            assert (await box.exec("echo still here")).output == "still here\n"
        assert await anyio.to_thread.run_sync(node.wait, 30) == 0
    fleet.running.pop("one").communicate()


async def test_a_second_node_under_a_name_that_is_taken_stays_out(fleet: Fleet) -> None:
    fleet.gateway()
    fleet.node("one", "--slots", "3")
    async with connect(fleet.url) as client:
        await nodes_known(client, 1)
        join = str(fleet.folder / "join")
        own = ("serve", "--port", "0", "--backend", "process", "--join-token-file", join)
        fleet.start("twin", *own, "--name", "one", "--gateway", fleet.url, "--slots", "5")
        await anyio.sleep(0)
        async with client.sandbox() as box:
            assert box.name.endswith(".one")
            assert (await client.health())["max_sandboxes"] == 3
        fleet.end("one")
        with anyio.fail_after(100):
            while (await client.health())["max_sandboxes"] != 5:
                await anyio.sleep(0.1)
