"""What watchers see: lists of sandboxes on a node and behind a gateway, `skyenv top`, and the servers' logs."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
from fleet_processes import Fleet, fleet_in

from skyenv.commands.top import screen
from skyenv.errors import ConfigError, SandboxProtocolError
from skyenv.remote.client import connect
from skyenv.remote.logs import JsonLines, TextLines, log_to_stderr
from skyenv.remote.overview import merge

SECRET_WORDS = "the-command-itself"


def skyenv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "skyenv.cli", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A node started by the command, its log in a file."""
    log = tmp_path_factory.mktemp("log") / "log"
    command = [sys.executable, "-m", "skyenv.cli", "serve", "--port", "0", "--token", "secret", "--backend", "process"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--log-format", "json", "--log-level", "debug"], stdout=subprocess.PIPE, stderr=file, text=True
        )
        assert process.stdout is not None
        try:
            yield next(word for word in process.stdout.readline().split() if word.startswith("http")), log
        finally:
            process.terminate()
            process.wait(30)
            process.stdout.close()


async def test_a_node_lists_its_sandboxes(served: tuple[str, Path]) -> None:
    async with connect(served[0], "secret") as client, client.sandbox(env={"PASSWORD": "hunter2"}) as box:
        await box.exec(f"echo {SECRET_WORDS}")
        overview = await client.overview()
        (line,) = overview["sandboxes"]
        assert (line["name"], line["state"], line["image"]) == (box.name, "idle", None)
        assert 0 <= line["idle"] <= line["age"] < 600
        assert line["last"] < 100
        (node,) = overview["nodes"]
        assert (node["used"], node["idle"], node["state"]) == (1, 1, "up")
        assert node["execs"] >= 1
        assert not any(word in json.dumps(overview) for word in (SECRET_WORDS, "hunter2", "secret"))
        async with anyio.create_task_group() as group:
            group.start_soon(box.exec, "read line < <(sleep 30)")
            while (await client.overview())["sandboxes"][0]["state"] != "busy":
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()


async def test_looking_renews_no_lease(served: tuple[str, Path]) -> None:
    async with connect(served[0], "secret") as client, client.sandbox(ttl=600) as box:
        await box.exec("true")
        first = (await client.overview())["sandboxes"][0]["idle"]
        await anyio.sleep(0.05)
        assert (await client.overview())["sandboxes"][0]["idle"] > first


async def test_top_once_and_as_json(served: tuple[str, Path]) -> None:
    url = served[0]
    async with connect(url, "secret") as client, client.sandbox() as box:
        await box.exec("true")
        arguments = ("top", "--url", url, "--token", "secret")
        once = await anyio.to_thread.run_sync(lambda: skyenv(*arguments, "--once"))
        assert once.returncode == 0, once.stderr
        assert box.name[:8] in once.stdout
        assert max(map(len, once.stdout.splitlines())) <= 80
        as_json = await anyio.to_thread.run_sync(lambda: skyenv(*arguments, "--json"))
        assert json.loads(as_json.stdout)["sandboxes"][0]["name"] == box.name


def test_top_says_what_is_wrong(served: tuple[str, Path]) -> None:
    result = skyenv("top", "--url", served[0], "--token", "other", "--once")
    assert (result.returncode, result.stdout) == (2, "")
    assert "token" in result.stderr


async def test_the_log_has_ids_and_no_commands(served: tuple[str, Path]) -> None:
    url, log = served
    async with connect(url, "secret") as client, client.sandbox(env={"PASSWORD": "hunter2"}) as box:
        await box.exec(f"echo {SECRET_WORDS}")
        await box.exec("sleep 30", timeout=0.1)
    ours: list[dict[str, str]] = []
    with anyio.fail_after(100):
        while len(ours) < 4:
            text = log.read_text()
            lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            ours = [line for line in lines if line.get("sandbox") == box.name]
            await anyio.sleep(0.02)
    assert not any(word in text for word in (SECRET_WORDS, "hunter2", "sleep 30"))
    messages = [line["message"] for line in ours]
    assert messages == ["sandbox started", "command ended", "command ended", "sandbox ended"]
    assert [line["outcome"] for line in ours[1:3]] == ["zero", "timeout"]
    assert [line["level"] for line in ours[1:3]] == ["debug", "info"]
    assert len({line["exec"] for line in ours[1:3]}) == 2
    assert ours[3]["reason"] == "deleted"


async def test_a_gateway_lists_the_sandboxes_of_all_nodes(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice: alices-token\n")
    with fleet_in(tmp_path) as fleet:
        fleet.gateway("--token-file", str(tokens))
        for name in ("one", "two"):
            fleet.node(name)
        await _check_gateway(fleet)


def _scrape(url: str) -> str:
    answer = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer alices-token"}, trust_env=False, timeout=100)
    return answer.raise_for_status().text


async def _check_gateway(fleet: Fleet) -> None:
    async with connect(fleet.url, "alices-token") as client:
        with anyio.fail_after(100):
            while len((await client.overview())["nodes"]) < 2:
                await anyio.sleep(0.05)
        async with client.sandbox() as one, client.sandbox() as two:
            overview = await client.overview()
            assert {node["state"] for node in overview["nodes"]} == {"up"}
            named = {f"{line['name']}.{line['node']}" for line in overview["sandboxes"]}
            assert {one.name, two.name} <= named
            counted = await anyio.to_thread.run_sync(lambda: _scrape(fleet.url))
            assert 'skyenv_nodes{state="up"} 2.0' in counted
            assert 'skyenv_slots{use="used"}' in counted


def test_a_node_that_does_not_answer_is_told() -> None:
    said = {"nodes": [{"name": "", "state": "up"}], "sandboxes": [{"name": "f" * 32}]}
    merged = merge([("b", json.dumps(said).encode())], ["a"])
    assert merged["nodes"] == [{"name": "a", "state": "silent"}, {"name": "b", "state": "up"}]
    assert merged["sandboxes"] == [{"name": "f" * 32, "node": "b"}]
    with pytest.raises(SandboxProtocolError, match="'b'"):
        merge([("b", b"[1")], [])


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_screen_fits_a_small_terminal(nodes: int) -> None:
    from rich.console import Console

    line = {"image": "registry.example/some/very/long/name:latest", "age": 3.0, "idle": 1e6, "memory": 5 << 30}
    boxes = [{"name": f"{n:032x}", "node": "node-with-a-long-name", "state": "frozen", **line} for n in range(40)]
    fleet = [{"name": "silent", "state": "silent"}] + [
        {"name": f"n{n}", "state": "up", "slots": 1024, "used": 1000, "execs": 123456, "exec_p50": 0.0012}
        for n in range(nodes)
    ]
    out = io.StringIO()
    Console(file=out, width=80, height=24).print(screen({"nodes": fleet, "sandboxes": boxes}, "http://h", "age", 23))
    lines = out.getvalue().rstrip("\n").split("\n")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "40 of" in lines[0]
    assert f"... and {40 - (23 - (nodes + 1) - 6)} more" in lines[-1]
    assert any("5.0G" in line and "12d" in line for line in lines)


def test_a_record_as_json_and_as_text() -> None:
    record = logging.makeLogRecord({"name": "a.b", "levelname": "INFO", "msg": "n %s", "args": (1,), "sandbox": "é\n"})
    said = json.loads(JsonLines().format(record))
    assert (said["message"], said["sandbox"], said["level"]) == ("n 1", "é\n", "info")
    assert "\n" not in JsonLines().format(record)
    assert TextLines().format(record).endswith("n 1 sandbox='é\\n'")


def test_an_unknown_log_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="json"):
        log_to_stderr("xml")


def test_a_server_takes_the_descriptors_that_it_may_have() -> None:
    code = (
        "import resource; from skyenv.remote.listen import run\n"
        "async def main(): print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))\nrun(main)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2048", "2048"]
