"""Node servers that are killed: with a state directory the next one takes over, and nothing is lost or run twice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from node_processes import SERVE, SERVE_PATIENT, served
from test_lifecycle import alive, children, eventually, names_in, remains, state_of, tree

from skyenv.errors import ConfigError, SandboxLost, SandboxProtocolError, SandboxUnavailable
from skyenv.remote.backends.launching import Home
from skyenv.remote.backends.local import LocalBackend
from skyenv.remote.calls import Result
from skyenv.remote.protocol import CreateRequest, ExecParameters, PollParameters
from skyenv.remote.sandboxes import Node
from skyenv.remote.session import Session

NAME = "a" * 32
OTHER = "b" * 32
HEADERS = {"authorization": "Bearer secret"}


def http_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=100)


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


def launcher_in(home: Path) -> int:
    """The launcher whose state is below `home`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive([int(entry.name)]):
            links = []
            for path in Path(f"/proc/{entry.name}/fd").glob("*"):
                try:
                    links.append(os.readlink(path))
                except OSError:
                    continue
            if any(link.startswith(f"{home}/") and link.endswith("/lock") for link in links):
                return int(entry.name)
    raise AssertionError(f"no launcher in {home}")


async def execute(
    http: httpx.AsyncClient, command: str, key: str, name: str = NAME, wait: float = 20.0
) -> httpx.Response:
    path = f"/sandboxes/{name}/exec?wait={wait}&timeout=30"
    return await http.post(path, content=command, headers={"idempotency-key": key})


@pytest.mark.parametrize("backend", ["local", "process"])
async def test_the_next_server_takes_over_what_a_killed_one_left(backend: str, tmp_path: Path) -> None:
    home = str(tmp_path / "state")
    with served(SERVE, backend, home) as (first, url):
        async with http_client(url) as http:
            for name in (NAME, OTHER):
                assert (await http.put(f"/sandboxes/{name}", content="{}")).status_code == 200
            await execute(http, "cd /tmp; mine=kept; f() { echo function; }; sleep 600 &", "setup")
            await http.post(f"/sandboxes/{OTHER}/pause", headers={"idempotency-key": "p"})
            go = tmp_path / "go"  # in the sandbox that isolates, a file of its own under the same name
            waiting = f"echo begun; until [ -e {go} ]; do sleep 0.05; done; echo once >> ~/log; cat ~/log"
            running = await execute(http, waiting, "work", wait=0.3)
            assert running.status_code == 202
        launcher = launcher_in(tmp_path)
        state, names = state_of(launcher), names_in(state_of(launcher))
        first.kill()
        first.wait()
        assert len(names_in(state)) == 2
        with served(SERVE, backend, home, port_of(url)) as (_second, _url):
            async with http_client(url) as http:
                assert (await http.get("/health")).json()["sandboxes"] == 2
                made = await http.put(
                    f"/sandboxes/{NAME}/file?path={go}", content="", headers={"idempotency-key": "go"}
                )
                assert made.status_code == 200
                for _again in range(2):
                    assert (await http.get(f"/sandboxes/{NAME}/calls/work")).content == b"begun\nonce\n"
                    assert (await execute(http, "echo never", "work")).content == b"begun\nonce\n"
                kept = await execute(http, 'f; echo "$mine in $PWD"; jobs | wc -l', "after")
                assert kept.content == b"function\nkept in /tmp\n1\n"
                assert (await http.put(f"/sandboxes/{NAME}", content="{}")).status_code == 200
                assert (await execute(http, "echo awake", "one", name=OTHER)).content == b"awake\n"
                assert (await http.delete(f"/sandboxes/{OTHER}")).status_code == 200
                assert (await execute(http, "echo", "two", name=OTHER)).status_code == 410
                pids = [launcher, *tree([launcher])]
        await eventually(lambda: remains(state, names, pids))


async def test_a_second_server_on_the_same_state_is_refused_and_hurts_nobody(tmp_path: Path) -> None:
    with served(SERVE, "local", str(tmp_path / "state")) as (_process, url):
        async with http_client(url) as http:
            await http.put(f"/sandboxes/{NAME}", content="{}")
            for backend in ("local", "process"):
                with pytest.raises(AssertionError, match="status 1"), served(SERVE, backend, str(tmp_path / "state")):
                    pass
            assert (await execute(http, "echo alive", "k")).content == b"alive\n"


async def test_a_killed_launcher_ends_everything_and_the_state_can_be_used_again(tmp_path: Path) -> None:
    home = str(tmp_path / "state")
    with served(SERVE, "local", home) as (_process, url):
        async with http_client(url) as http:
            await http.put(f"/sandboxes/{NAME}", content="{}")
            await http.put(f"/sandboxes/{OTHER}", content="{}")
            await http.post(f"/sandboxes/{OTHER}/pause", headers={"idempotency-key": "p"})
            launcher = launcher_in(tmp_path)
            pids = tree([launcher])
            os.kill(launcher, signal.SIGKILL)
            with anyio.fail_after(100):  # the sandbox may answer once more before the kernel ends it
                number = 0
                while (answer := await execute(http, "echo", f"k{number}")).status_code == 200:
                    number += 1
            assert answer.status_code == 410
    await eventually(lambda: alive(pids))
    with served(SERVE, "local", home) as (_process, url):
        async with http_client(url) as http:
            assert (await http.get("/health")).json()["sandboxes"] == 0
            assert (await http.put(f"/sandboxes/{NAME}", content="{}")).status_code == 200


@asynccontextmanager
async def opened(node: Node) -> AsyncIterator[Node]:
    async with node.open():
        yield node


def node_in(home: Path) -> Node:
    return Node(LocalBackend(home=Home(home / "state")))


async def run(session: Session, key: str, command: bytes) -> bytes:
    return (await session.exec(key, command, ExecParameters())).body


async def test_leases_end_while_no_server_is_there_and_everything_does_after_a_while(tmp_path: Path) -> None:
    with served(SERVE_PATIENT, str(tmp_path / "state"), "10") as (server, url):
        async with http_client(url) as http:
            await http.put(f"/sandboxes/{NAME}", content='{"spec": {"ttl": 1.0}}')
            await http.put(f"/sandboxes/{OTHER}", content="{}")
        launcher = launcher_in(tmp_path)
        state, pids = state_of(launcher), [launcher, *tree([launcher])]
        inits = children(launcher)
        server.kill()
        await eventually(lambda: alive(inits)[1:])
        assert len(alive(inits)) == 1
        await eventually(lambda: remains(state, [], pids))
    assert not (tmp_path / "state/launcher.sock").exists()


async def test_snapshots_and_their_layers_are_taken_over(tmp_path: Path) -> None:
    with served(SERVE, "local", str(tmp_path / "state")) as (server, url):
        async with http_client(url) as http:
            await http.put(f"/sandboxes/{NAME}", content="{}")
            await execute(http, "echo kept > /root/file", "1")
            answer = await http.post(f"/sandboxes/{NAME}/snapshot", headers={"idempotency-key": "s"})
            snapshot = json.loads(answer.headers["skyenv-meta"])["snapshot"]
            await execute(http, "echo changed > /root/file", "2")
        server.kill()
    async with opened(node_in(tmp_path)) as node:
        await node.create(OTHER, CreateRequest(snapshot=snapshot))
        assert await run(node.session(OTHER), "1", b"cat /root/file") == b"kept\n"
        assert await run(node.session(NAME), "3", b"cat /root/file") == b"changed\n"
        await node.backend.delete_snapshot(snapshot)
        with pytest.raises(ConfigError):
            await node.create("c" * 32, CreateRequest(snapshot=snapshot))


async def test_a_lease_goes_on_where_the_last_server_noted_it(tmp_path: Path) -> None:
    """A sandbox does not get a new lease from every server that is killed."""
    with served(SERVE, "local", str(tmp_path / "state")) as (server, url):
        async with http_client(url) as http:
            before = time.monotonic()
            await http.put(f"/sandboxes/{NAME}", content='{"spec": {"ttl": 80.0}}')
            created = time.monotonic()
        server.kill()
    async with opened(node_in(tmp_path)) as node:
        session = node._sessions[NAME]
        assert before + 90 <= session.record["expires"] <= created + 90
        assert session.last_use <= created + 10


async def second_connection(node: Node) -> Session:
    """A sandbox's session over a fresh socket, as a restarted server has it; the one before is cut off."""
    old = node._sessions.pop(NAME)
    sock = await node.backend.attach(old.sandbox)
    assert node._group is not None
    session = node._sessions[NAME] = Session(old.sandbox, sock, old.record, node.backend, node._group, node.metrics)
    node._group.start_soon(session.channel.serve)
    return session


async def test_calls_are_known_by_their_keys_until_they_are_acknowledged() -> None:
    async with opened(Node(LocalBackend())) as node:
        await node.create(NAME, CreateRequest())
        assert await run(node.session(NAME), "one", b"echo x >> log; cat log") == b"x\n"
        session = await second_connection(node)
        assert await run(session, "one", b"echo x >> log; cat log") == b"x\n"
        assert (await session.follow("one")).body == b"x\n"
        with pytest.raises(SandboxProtocolError, match="known"):
            await session.follow("two")
        session.acknowledge("one")
        assert await run(session, "two", b"echo x >> log; cat log") == b"x\nx\n"
        with pytest.raises(SandboxProtocolError, match="acknowledged"):
            await run(session, "one", b"echo x >> log; cat log")
        assert await run(session, "three", b"cat log") == b"x\nx\n"


async def test_output_that_was_polled_can_be_fetched_again() -> None:
    async with opened(Node(LocalBackend())) as node:
        await node.create(NAME, CreateRequest())
        command = b"for i in 1 2 3; do echo $i; until [ -e go$i ]; do sleep 0.05; done; done; exit 7"
        parts = [await node.session(NAME).exec("k0", command, ExecParameters(flush=0.0))]
        while parts[-1].meta.get("running"):
            await node.session(NAME).write_file(f"w{len(parts)}", f"/root/go{len(parts)}", b"", None)
            session = await second_connection(node)
            key = f"k{len(parts)}"
            part = await session.poll(key, PollParameters(flush=0.0))
            assert await (await second_connection(node)).poll(key, PollParameters(flush=0.0)) == part
            parts.append(part)
        assert len(parts) > 3
        assert b"".join(part.body for part in parts) == b"1\n2\n3\n"
        assert parts[-1].meta["exit_code"] == 7


async def test_an_upload_that_was_cut_off_is_not_an_answer() -> None:
    async with opened(Node(LocalBackend())) as node:
        await node.create(NAME, CreateRequest())
        data = os.urandom(3_000_000)
        reader, writer = os.pipe()
        header = {
            "op": "write",
            "path": "/root/x",
            "expected_bytes": None,
            "size": len(data),
            "streamed": True,
            "key": "k",
        }
        async with anyio.create_task_group() as group:
            group.start_soon(_send_to_the_end, node.session(NAME), header, reader)
            os.write(writer, data[:10_000])
            await node.session(NAME).status()
            session = await second_connection(node)
            os.close(writer)
        os.close(reader)
        assert await written(session, data) == Result({})
        assert await session.read_file("/root/x", 0, None) == data


async def _send_to_the_end(session: Session, header: dict[str, object], reader: int) -> None:
    with pytest.raises(SandboxLost):
        await session.channel.request(dict(header), fds=(reader,))


async def written(session: Session, data: bytes) -> Result:
    """Ask as a client does: a call that was cut off says at first that it wants to be asked again."""
    while True:
        try:
            return await session.write_file("k", "/root/x", data, None)
        except SandboxUnavailable:
            await anyio.sleep(0.01)
