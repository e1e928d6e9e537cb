"""What a gateway knows of its nodes, when they are silent, leave, or send nonsense; tokens and TLS of servers."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
import trustme
from fleet_processes import Fleet as Processes
from fleet_processes import fleet_in
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv.errors import ConfigError, SandboxLost, SandboxProtocolError, SandboxUnavailable
from skyenv.remote.client import connect
from skyenv.remote.fleet import Fleet, origin_of
from skyenv.remote.gateway import gateway_app
from skyenv.remote.heartbeat import Heartbeat
from skyenv.remote.http1 import Pool
from skyenv.remote.listen import Listening, serve_app
from skyenv.remote.protocol import NodeReport
from skyenv.remote.tokens import Tokens, parse_tokens


def report(instance: str = "i", url: str = "http://127.0.0.1:1", **values: object) -> NodeReport:
    return NodeReport(url=url, instance=instance, slots=4, **values)


async def refused_for_now(fleet: Fleet, name: str) -> str | None:
    with pytest.raises(SandboxUnavailable) as caught:
        fleet.find(name)
    assert caught.value.retry_after
    return caught.value.reason


async def test_a_young_gateway_does_not_call_a_node_lost() -> None:
    assert await refused_for_now(Fleet(), "one") == "node_unknown"
    old = Fleet(started=anyio.current_time() - 61)
    with pytest.raises(SandboxLost) as caught:
        old.find("one")
    assert caught.value.reason == "node_lost"
    old.report("one", report())
    assert old.find("one").origin == origin_of("http://127.0.0.1:1")


async def test_a_silent_node_gets_nothing_new_and_is_lost_in_the_end() -> None:
    fleet = Fleet(silence=10, forget=60, started=-100.0)
    fleet.report("one", report())
    member = fleet.find("one")
    assert [seats.name for seats in fleet.open_seats()] == ["one"]
    member.seen -= 11
    assert not fleet.open_seats()
    assert fleet.find("one") is member
    fleet.report("one", report())
    assert fleet.open_seats()
    fleet.find("one").seen -= 61
    with pytest.raises(SandboxLost):
        fleet.find("one")


async def test_a_node_that_did_not_answer_waits_for_its_next_heartbeat() -> None:
    fleet = Fleet()
    fleet.report("one", report())
    fleet.suspect("one")
    assert not fleet.open_seats()
    fleet.report("one", report())
    assert fleet.open_seats()
    fleet.assume_one_more("one")
    assert fleet.open_seats()[0].used == 1
    fleet.report("one", report(draining=True))
    assert not fleet.open_seats()
    assert fleet.answering()


async def test_a_node_that_said_goodbye_is_lost_at_once() -> None:
    fleet = Fleet()
    fleet.report("one", report())
    fleet.leave("one", "i")
    with pytest.raises(SandboxLost):
        fleet.find("one")
    assert await refused_for_now(fleet, "two") == "node_unknown"


async def test_a_name_belongs_to_one_living_node() -> None:
    fleet = Fleet(started=-100.0)
    fleet.report("one", report("first", "http://127.0.0.1:1"))
    with pytest.raises(SandboxProtocolError) as caught:
        fleet.report("one", report("second", "http://127.0.0.1:2"))
    assert caught.value.reason == "name_taken"
    fleet.report("one", report("restarted", "http://127.0.0.1:1"))
    fleet.leave("one", "first")
    assert fleet.find("one").report.instance == "restarted"
    fleet.leave("one", "restarted")
    with pytest.raises(SandboxLost):
        fleet.find("one")
    fleet.report("one", report("second", "http://127.0.0.1:2"))
    assert fleet.find("one").report.instance == "second"
    with pytest.raises(ConfigError, match="lower-case"):
        fleet.report("One!", report())


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"url": "http://x"}', b'{"url": "file:///etc", "instance": "i", "slots": 1}',
     b'{"url": "http://x", "instance": "i", "slots": -1}'],
)  # fmt: skip
async def test_a_broken_heartbeat_is_refused(body: bytes) -> None:
    async with Pool() as pool:
        app = gateway_app(Fleet(), pool, clients=None, join_token="join")
        headers = {"authorization": "Bearer join"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g", headers=headers) as http:
            assert (await http.post("/nodes/one", content=body)).status_code == 422
            newer = b'{"url": "http://x", "instance": "i", "slots": 1, "future": [1]}'
            assert (await http.post("/nodes/one", content=newer)).status_code == 200


PIECES = ("sandboxes", "creations", "snapshots", "leases", "pools", "nodes", "health", "a" * 32, "a" * 32 + ".one",
          ".one", ".", "", "exec", "calls", "k", "drain", "%2e", "é")  # fmt: skip
BODIES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"[" * 200_000,
    b'{"image": "\\ud800"}',
    b'{"snapshot": ".one"}',
    b'["x.one", 3]',
    b"\xff",
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"]),
    st.lists(st.sampled_from(PIECES), max_size=5),
    st.sampled_from(BODIES),
    st.sampled_from([{}, {"skyenv-attempt": "2"}, {"skyenv-attempt": "x"}]),
)
def test_no_request_breaks_a_gateway(method: str, pieces: list[str], body: bytes, headers: dict[str, str]) -> None:
    """Whatever is asked of one whose only node is dead is answered, and never with 500."""

    async def ask() -> int:
        async with Pool(connect_timeout=1.0) as pool:
            fleet = Fleet()
            fleet.report("one", report())
            app = gateway_app(fleet, pool, clients=None, join_token="join")
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, headers=headers) as http:
                return (await http.request(method, "http://g/" + "/".join(pieces), content=body)).status_code

    assert anyio.run(ask) in (200, 400, 401, 404, 405, 410, 422, 503)


async def test_every_address_behind_a_name_hears_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with two addresses, which are asked for again each time, and a gateway on each."""
    hosts, fleets = ("127.0.0.1", "127.0.0.2"), [Fleet(silence=3.0), Fleet(silence=0.9)]
    known = [hosts[0]]

    async def resolve(host: str, port: int, **_hints: object) -> list[tuple[object, ...]]:
        assert host == "gateways.test"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known]

    monkeypatch.setattr(anyio, "getaddrinfo", resolve)
    async with Pool() as pool, anyio.create_task_group() as group:
        port = 0
        for host, fleet in zip(hosts, fleets, strict=True):
            listening = Listening(host, port)
            listener = listening.bind()
            port = listener.getsockname()[1]
            app = gateway_app(fleet, pool, clients=None, join_token="join")
            group.start_soon(serve_app, app, listening, listener, anyio.Event(), lambda _url: None)
        beat = Heartbeat("one", (f"http://gateways.test:{port}",), "join", report)
        async with anyio.create_task_group() as beating, anyio.create_task_group() as inner:
            inner.start_soon(beat.run)
            with anyio.fail_after(100):
                while not fleets[0].answering():
                    await anyio.sleep(0.02)
                assert not fleets[1].answering()
                known.append(hosts[1])
                while not all(fleet.answering() for fleet in fleets):
                    await anyio.sleep(0.02)
            assert beat.interval == pytest.approx(0.3)
            beating.cancel_scope.cancel()
        assert not any(fleet.answering() for fleet in fleets)
        group.cancel_scope.cancel()


def test_a_token_file_is_read_line_by_line() -> None:
    assert parse_tokens("# who\n\nalice: a\nalice: b\nbare\n", "f") == [
        ("alice", "a"), ("alice", "b"), ("client", "bare"),
    ]  # fmt: skip
    for text, where in (("", "no token"), ("a: \n", "line 1"), ("ok: x\ntwo words\n", "line 2")):
        with pytest.raises(ConfigError, match=where):
            parse_tokens(text, "f")


def test_tokens_are_reloaded_unless_the_file_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice: a\n")
    tokens = Tokens([("gateway", "g")], file)
    assert [tokens.owner(token) for token in ("a", "g", "b", "")] == ["alice", "gateway", None, None]
    file.write_text("bob: b\n")
    tokens.reload()
    assert [tokens.owner(token) for token in ("a", "g", "b")] == [None, "gateway", "bob"]
    file.write_text("two words\n")
    tokens.reload()
    assert tokens.owner("b") == "bob"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with fleet_in(tmp_path) as fleet:
        yield fleet


async def test_tokens_of_a_running_server_are_reloaded(processes: Processes) -> None:
    tokens = processes.folder / "tokens"
    tokens.write_text("alice: first\n")
    url = processes.start("node", "serve", "--port", "0", "--backend", "process", "--token-file", str(tokens))
    async with connect(url, "first") as client, connect(url, "second") as later:
        await client.health()
        with pytest.raises(ConfigError):
            await later.health()
        tokens.write_text("alice: second\n")
        processes.running["node"].send_signal(signal.SIGHUP)
        with anyio.fail_after(100):
            while True:
                try:
                    await later.health()
                except ConfigError:
                    await anyio.sleep(0.02)
                else:
                    break
        with pytest.raises(ConfigError):
            await client.health()


async def test_everything_speaks_tls(processes: Processes) -> None:
    authority, folder = trustme.CA(), processes.folder
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(str(folder / "cert.pem"), append=True)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    tls = ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"), "--ca", str(folder / "ca.pem"))
    url = processes.gateway(*tls)
    assert url.startswith("https://")
    processes.node("one", *tls)
    async with connect(url, verify=folder / "ca.pem") as client:
        with anyio.fail_after(100):
            while (await client.health())["nodes"] != 1:
                await anyio.sleep(0.05)
        async with client.sandbox() as box:
            assert (await box.exec("echo safe")).output == "safe\n"
            data = b"x" * 3_000_000
            await box.write_file("/tmp/tls-test", data)
            assert await box.read_file("/tmp/tls-test") == data
            await box.remove("/tmp/tls-test")
    async with connect(url) as client:
        with pytest.raises(SandboxUnavailable, match="certificate"):
            await client.health()
    async with connect(url, verify=False) as client:
        assert (await client.health())["nodes"] == 1
    with pytest.raises(ssl.SSLError), socket.create_connection(origin_of(url)[1:3]) as plain:
        ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1")
    with pytest.raises(ConfigError, match="verify"):
        async with connect(url, verify=folder / "missing"):
            pass
