"""The client against servers that are slow, away, hostile or crowded: what is sent again, and its three clocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
from anyio.abc import SocketStream
from serving import serving
from starlette.types import Receive, Scope, Send

from skyenv.errors import SandboxError, SandboxLost, SandboxProtocolError, SandboxUnavailable
from skyenv.remote import answers, listen, node, sending
from skyenv.remote.backends import get
from skyenv.remote.client import SandboxClient, connect
from skyenv.remote.node import app_for
from skyenv.remote.protocol import encode_meta
from skyenv.remote.sandboxes import Node
from skyenv.remote.sending import Fate, fate_of, sender_to
from tests.ports import free_port

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nskyenv-meta: {}\r\n\r\nhi"
RESULT = encode_meta({"exit_code": 0, "cwd": "/", "seconds": 0.0, "head": 2, "output_bytes": 2}).encode()


@asynccontextmanager
async def scripted(*replies: bytes | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers its connections in turn with these bytes (None: it hangs up), and what it was sent."""
    heard: list[bytes] = []
    left = list(replies)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def answer(stream: SocketStream) -> None:
        async with stream:
            heard.append(await stream.receive())
            reply = left.pop(0) if left else OK
            if reply is not None:
                await stream.send(reply.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))

    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        yield f"http://127.0.0.1:{port}", heard
        group.cancel_scope.cancel()


def error(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


async def test_what_may_have_been_executed_is_sent_again_only_with_a_key() -> None:
    async with scripted(None, None, OK) as (url, heard), sender_to(url, None) as sender:
        response = await sender.send("POST", "/sandboxes/x/exec", b"echo", {"idempotency-key": "k"})
        assert response.content == b"hi"
        assert [b"skyenv-attempt: 3" in each for each in heard] == [False, False, True]
        assert all(b"idempotency-key: k" in each for each in heard)
    async with scripted(None, OK) as (url, heard), sender_to(url, None) as sender:
        with pytest.raises(SandboxError, match="broke"):
            await sender.send("POST", "/sandboxes/x/exec", b"echo")
        assert len(heard) == 1


async def test_what_was_never_sent_is_sent_again_without_a_key() -> None:
    port = free_port()
    async with sender_to(f"http://127.0.0.1:{port}", None) as sender, anyio.create_task_group() as group:

        async def late() -> None:
            await anyio.sleep(0.15)
            listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)

            async def answer(stream: SocketStream) -> None:
                async with stream:
                    await stream.receive()
                    await stream.send(OK)

            async with listener:
                await listener.serve(answer)

        group.start_soon(late)
        assert (await sender.send("POST", "/sandboxes/x/exec", b"echo")).content == b"hi"
        group.cancel_scope.cancel()


async def test_a_server_that_says_when_to_come_back_is_asked_then() -> None:
    full = '{"code": "unavailable", "message": "all taken", "retry_after": 0.4, "reason": "full"}'
    async with scripted(error("429 Too Many Requests", full)) as (url, heard), sender_to(url, None) as sender:
        started = anyio.current_time()
        await sender.send("PUT", "/sandboxes/x", b"{}")
        assert anyio.current_time() - started >= 0.4
        assert len(heard) == 2


async def test_patience_ends_with_the_reason() -> None:
    full = error(
        "429 No", '{"code": "unavailable", "message": "all taken", "retry_after": 0.1, "reason": "queue_full"}'
    )
    async with scripted(*[full] * 99) as (url, _heard), sender_to(url, None, patience=0.5) as sender:
        with pytest.raises(SandboxUnavailable) as caught:
            await sender.send("PUT", "/sandboxes/x", b"{}")
    assert caught.value.reason == "queue_full"


async def test_a_refusal_is_final_and_a_proxys_error_is_not() -> None:
    lost = error("410 Gone", '{"code": "lost", "message": "its lease ran out", "reason": "lease"}')
    async with scripted(lost) as (url, heard), sender_to(url, None) as sender:
        with pytest.raises(SandboxLost) as caught:
            await sender.send("GET", "/sandboxes/x/info")
        assert (caught.value.reason, len(heard)) == ("lease", 1)
    async with scripted(error("502 Bad Gateway", "<html>nginx</html>")) as (url, heard), sender_to(url, None) as sender:
        assert (await sender.send("GET", "/sandboxes/x/info")).content == b"hi"
        assert len(heard) == 2
    newer = error("418 Teapot", '{"code": "from_the_future", "message": "m", "reason": "unheard_of"}')
    async with scripted(newer) as (url, _heard), sender_to(url, None) as sender:
        with pytest.raises(SandboxError, match="m"):
            await sender.send("GET", "/sandboxes/x/info")


@pytest.mark.parametrize("reply", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort"])
async def test_nonsense_is_a_broken_connection(reply: bytes) -> None:
    async with scripted(*[reply] * 9) as (url, _heard), sender_to(url, None, patience=0.3) as sender:
        with pytest.raises(SandboxError, match="broke"):
            await sender.send("GET", "/health")


def test_failures_are_told_apart() -> None:
    assert fate_of(httpx.ConnectError("")) is Fate.NEVER_SENT
    assert fate_of(SandboxUnavailable("", 1.0, reason="full")) is Fate.NEVER_SENT
    assert fate_of(SandboxUnavailable("", 1.0, reason="node_unreachable")) is Fate.MAYBE_EXECUTED
    assert fate_of(httpx.ReadError("")) is Fate.MAYBE_EXECUTED
    assert fate_of(SandboxUnavailable("never")) is Fate.EXECUTED
    assert fate_of(SandboxProtocolError("")) is Fate.EXECUTED


async def test_a_server_that_fell_silent_is_waited_for_once_not_for_every_request() -> None:
    async with scripted(OK) as (url, _heard):
        sender = sender_to(url, None, patience=3.0)
        await sender.send("GET", "/health")
    async with sender:
        with pytest.raises(SandboxUnavailable):
            await sender.send("GET", "/health")
        started = anyio.current_time()
        with pytest.raises(SandboxUnavailable):
            await sender.send("GET", "/health")
        assert anyio.current_time() - started < 3.0


async def test_a_thousand_requests_at_a_time_from_one_client() -> None:
    """G10: every one of a thousand commands is at the server before the first answer, and all come back."""
    waiting, everybody = [], anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            continue
        waiting.append(scope["path"])
        if len(waiting) == 1000:
            everybody.set()
        await everybody.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"skyenv-meta", RESULT)]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app) as url, sender_to(url, None) as sender:
        client, results = SandboxClient(sender), []

        async def one(number: int) -> None:
            response = await client.call("POST", f"/sandboxes/{number:032x}/exec", b"true", headers={})
            results.append(response.content)

        with anyio.fail_after(500):
            async with anyio.create_task_group() as group:
                for number in range(1000):
                    group.start_soon(one, number)
        assert results == [b"ok"] * 1000
        assert len(set(waiting)) == 1000


async def test_a_command_outlives_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: requests end after a fraction of a second, the command when it is done."""
    monkeypatch.setattr(node, "MAX_WAIT", 0.2)
    monkeypatch.setattr(sending, "REQUEST_TIMEOUT", 0.6)
    backend_node = Node(get("process"))
    async with backend_node.open(), serving(app_for(backend_node)) as url, connect(url) as client:
        async with client.sandbox() as box:
            result = await box.exec("for i in 1 2 3 4 5; do sleep 0.3; echo $i; done", timeout=30)
            assert (result.exit_code, result.output, result.timed_out) == (0, "1\n2\n3\n4\n5\n", False)
            stopped = await box.exec("sleep 30", timeout=0.7)
            assert (stopped.exit_code, stopped.timed_out) == (124, True)


async def test_a_creation_that_waits_says_how_far_it_is() -> None:
    from skyenv.remote.admission import Admission

    crowded = Node(get("process"), admission=Admission(slots=1))
    async with crowded.open(), serving(app_for(crowded)) as url, connect(url) as client:
        states: list[str] = []
        async with anyio.create_task_group() as group, client.sandbox() as first:

            async def second() -> None:
                async with client.sandbox(on_state=states.append) as box:
                    assert (await box.exec("echo in")).output == "in\n"

            group.start_soon(second)
            with anyio.fail_after(100):
                while not states:
                    await anyio.sleep(0.02)
            assert (await first.exec("echo alive")).output == "alive\n"
        assert states[0] == "queued"
        assert set(states) <= {"queued", "pulling", "starting"}
        assert list(dict.fromkeys(states)) == states


async def test_who_gives_up_while_queued_takes_no_place() -> None:
    from skyenv.remote.admission import Admission

    crowded = Node(get("process"), admission=Admission(slots=1))
    async with crowded.open(), serving(app_for(crowded)) as url, connect(url) as client:
        async with client.sandbox():
            with anyio.move_on_after(0.3):
                async with client.sandbox():
                    raise AssertionError
            with anyio.fail_after(100):
                while (await client.health())["queued"]:
                    await anyio.sleep(0.02)
        assert crowded.admission.used == 0


async def test_heads_and_bodies_are_bounded() -> None:
    served = Node(get("process"))
    async with served.open(), serving(app_for(served)) as url, httpx.AsyncClient(base_url=url, timeout=100) as http:
        huge = await http.get("/health", headers={"x-large": "x" * 300_000})
        assert huge.status_code == 400
        body = await http.post("/leases", content=b"[" + b" " * (9 << 20) + b"]")
        assert (body.status_code, body.json()["reason"]) == (413, "too_large")

        async def endless() -> AsyncIterator[bytes]:
            for _part in range(10):
                yield b" " * (1 << 20)

        assert (await http.post("/leases", content=endless())).status_code == 413
        assert (await http.get("/health")).status_code == 200


async def test_who_never_finishes_a_request_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEAD_TIMEOUT", 0.3)
    whole = b"GET /health HTTP/1.1\r\nhost: n\r\n\r\n"
    served = Node(get("process"))
    async with served.open(), serving(app_for(served)) as url:
        port = int(url.rpartition(":")[2])
        for start in (b"", b"GET /health HT", whole + b"GET /hea"):
            stream = await anyio.connect_tcp("127.0.0.1", port)
            async with stream:
                if start:
                    await stream.send(start)
                with anyio.fail_after(100):
                    async for _part in stream:
                        continue
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            for _again in range(3):
                await stream.send(whole)
                assert (await stream.receive()).startswith(b"HTTP/1.1 200")
                await anyio.sleep(0.4)  # longer than a head may take


def test_retry_after_is_a_whole_number_for_others() -> None:
    from skyenv.remote.protocol import WireError

    answer = answers.error_answer(WireError(code="unavailable", message="m", retry_after=0.5, reason="full"))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
