"""C: background work, process trees and timeouts."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import anyio
import pytest

from catalogue.sessions import NO_SLEEP, PATIENCE, Run, let_go, raw_sandbox, run_all, session
from skyenv.remote.client import RemoteSandbox, connect

TREE = "import subprocess,time;subprocess.Popen(['sh','-c','sleep 600; true']);time.sleep(600)"
SERVER = "import http.server as h; h.HTTPServer(('127.0.0.1', 8123), h.SimpleHTTPRequestHandler).serve_forever()"
ASK = "import urllib.request as u; print(u.urlopen('http://localhost:8123/mark', timeout=50).read().decode())"

ROWS: dict[str, list[Run]] = {
    "C1 background child holds the output": [
        Run("sleep 600 &", ""),
        Run("nohup sleep 600 >/dev/null 2>&1 &", ""),
        Run("nohup sleep 600 &"),
        Run("nohup sleep 600 &"),
    ],
    "C1 background output stays out of the next result": [
        Run("(sleep 0.2; echo late) & echo now", "now\n"),
        Run("sleep 0.5; echo next", "next\n"),
    ],
    "C4 a tree outlives nothing": [
        Run(f'python3 -c "{TREE}"', code=124, timeout=0.7, timed_out=True),
        NO_SLEEP,
        Run("date >/dev/null"),
    ],
    "C5 timeout bounds the whole list": [
        Run("sleep 0.1 | sleep 600; sleep 600; sleep 600", code=124, timeout=0.3, timed_out=True),
        NO_SLEEP,
    ],
    "C8 background job survives a later timeout": [
        Run("sleep 601 & sh -c 'sleep 602; true' &"),
        Run("sleep 600", code=124, timeout=0.2, timed_out=True),
        Run("until [ $(ps -eo args | grep -c '^sleep 60[12]') = 2 ]; do :; done"),  # the second is still being started
    ],
    "C10 other shells": [
        Run("bash -ic 'echo hi' 2>/dev/null", "hi\n"),
        Run("bash -lc 'echo hi'", "hi\n"),
        Run("su - user -c 'id -un' 2>/dev/null", "user\n"),
        Run("script -qc 'echo hi' /dev/null", "hi\r\n"),
        Run("script -qc id /dev/null", lambda out: out.startswith("uid=0")),
    ],
    "C11 exit codes": [
        Run("nosuchcmd", lambda out: "nosuchcmd" in out, code=127),
        Run("touch /tmp/n; /tmp/n", code=126),
        Run("sh -c 'kill -9 $$'", code=137),
        Run("sh -c 'kill -TERM $$'", code=143),
    ],
    "C12 partial output of a timeout": [
        Run("echo part; sleep 600", "part\n", code=124, timeout=2.0, timed_out=True),
    ],
    "C12 busy shell": [Run("while :; do :; done", code=124, timeout=0.2, timed_out=True, restarted=True)],
    "C4 fork bomb": [Run(":(){ :|:& };:", code=None, timeout=0.5)],
    "C8 stopped background job": [
        Run("sleep 600 & kill -STOP $!"),
        Run("kill -CONT %1 2>/dev/null; kill $!", code=None),
    ],
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
async def test_session_survives(url: str, row: str) -> None:
    await run_all(url, ROWS[row])


@pytest.mark.parametrize("row", [name for name in ROWS if name[:3].strip() in ("C1", "C12") or "C11" in name][:4])
async def test_session_of_a_plain_sh_survives(local_url: str, row: str) -> None:
    await run_all(local_url, ROWS[row], shell="sh")


async def test_c3_many_sandboxes_many_commands(url: str) -> None:
    """Engines lose an exec in a thousand when many run at once; here none may hang or be mixed up."""
    sandboxes, commands = 8, 60

    async def work(box: RemoteSandbox, number: int) -> None:
        for step in range(commands):
            result = await box.exec(f"echo {number}.{step}", timeout=PATIENCE)
            assert (result.exit_code, result.output) == (0, f"{number}.{step}\n")

    async with connect(url, "secret") as client, anyio.create_task_group() as group:

        async def one(number: int) -> None:
            async with client.sandbox() as box:
                await work(box, number)

        for number in range(sandboxes):
            group.start_soon(one, number)


def host_processes(mark: str) -> list[int]:
    """Processes of this machine whose arguments contain `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in arguments:
                found.append(int(entry.name))
    return found


async def test_c7_nothing_outlives_its_sandbox(url: str) -> None:
    mark = f"y{secrets.token_hex(8)}"
    async with session(url) as box:
        await box.exec(f"for i in 1 2 3; do yes {mark} >/dev/null & done; setsid nohup yes {mark} >/dev/null 2>&1 &")
        with anyio.fail_after(100):
            while len(host_processes(mark)) != 4:  # the last one is on its way through setsid and nohup
                await anyio.sleep(0.01)
        name = box.name
    assert not host_processes(mark)
    assert not [folder for folder, _below, _files in os.walk("/sys/fs/cgroup") if name in folder]


async def test_c8_a_server_outlives_the_session_that_started_it(url: str) -> None:
    async with session(url) as box:
        await box.write_file("/root/mark", b"found")
        await box.exec(f'python3 -c "{SERVER}" >/dev/null 2>&1 &')
        ended = await box.exec("exit 5")
        assert ended.session_restarted
        wait = "for i in $(seq 500); do (exec 3<>/dev/tcp/127.0.0.1/8123) 2>/dev/null && break; sleep 0.1; done; "
        answer = await box.exec(f'{wait}python3 -c "{ASK}"', timeout=PATIENCE)
        assert answer.output == "found\n"


async def test_c13_a_command_takes_longer_than_any_request(url: str) -> None:
    """Each request ends soon and says that the command goes on; the last one has its result."""
    async with raw_sandbox(url) as (http, path):
        command = "until [ -e /tmp/go ]; do sleep 0.05; done; echo done; exit 3"
        answer = await http.post(f"{path}/exec?wait=0.2", content=command, headers={"idempotency-key": "long"})
        for _request in range(3):
            assert answer.status_code == 202
            answer = await http.get(f"{path}/calls/long?wait=0.2")
        await let_go(http, path)
        while answer.status_code == 202:
            answer = await http.get(f"{path}/calls/long?wait=0.2")
        assert (answer.status_code, answer.content) == (200, b"done\n")
        assert '"exit_code":3' in answer.headers["skyenv-meta"]


async def test_c14_a_timeout_is_never_a_success(url: str) -> None:
    async with session(url) as box:
        result = await box.exec("trap 'exit 0' INT; sleep 600", timeout=0.3)
        assert (result.timed_out, result.exit_code) == (True, 124)
        quiet = await box.exec("bash -c 'trap \"exit 0\" INT TERM; sleep 600 & wait'", timeout=0.3)
        assert (quiet.timed_out, quiet.exit_code) == (True, 124)
