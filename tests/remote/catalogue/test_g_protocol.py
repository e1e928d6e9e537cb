"""G: retries, versions and what travels: nothing runs twice, nothing is changed on the way."""

from __future__ import annotations

import json
import uuid
from typing import Any

import anyio
import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from catalogue.sessions import Run, let_go, raw_sandbox, run_all, session
from skyenv.errors import EnvError, SandboxLost, SandboxPathError
from skyenv.remote import backends
from skyenv.remote.client import SandboxClient
from skyenv.remote.node import app_for
from skyenv.remote.sandboxes import Node
from skyenv.remote.sending import Sender

HEADERS = {"authorization": "Bearer secret"}
COMMIT = "git -c user.name=a -c user.email=a@b commit -qm 1"


async def test_g6_the_same_key_never_runs_twice(url: str) -> None:
    async with raw_sandbox(url) as (http, path):
        answers: list[int] = []

        async def submit(client: httpx.AsyncClient, key: str) -> None:
            content = f"echo x >> log; {UNTIL_GO}; cat log"
            sent = await client.post(f"{path}/exec?wait=0.05", content=content, headers={"idempotency-key": key})
            answers.append(sent.status_code)

        async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=100) as other:
            async with anyio.create_task_group() as group:
                for client in (http, other, http, other):
                    group.start_soon(submit, client, "one")
        assert answers == [202] * 4
        await let_go(http, path)
        found = [await http.get(f"{path}/calls/one") for _again in range(2)]
        assert [(each.status_code, each.content) for each in found] == [(200, b"x\n")] * 2
        between = await http.post(f"{path}/exec", content="echo between", headers={"idempotency-key": "two"})
        assert between.content == b"between\n"
        again = await http.post(f"{path}/exec", content="echo other", headers={"idempotency-key": "one"})
        assert again.content == b"x\n"


UNTIL_GO = "until [ -e /tmp/go ]; do sleep 0.05; done"

# What the first released client sent: no version, no secret, no acknowledgement, no attempt.
FIRST: list[tuple[str, str, str, int]] = [
    ("PUT", "", '{"image": null, "snapshot": null, "env": {"A": "1"}, "spec": {"ttl": 60.0}}', 200),
    ("POST", "/exec?timeout=60.0&max_output_bytes=1048576", "echo $A; cd /tmp", 200),
    ("POST", "/exec?timeout=60.0&soft_timeout=0.2&max_output_bytes=100", f"{UNTIL_GO}; echo late", 200),
    ("PUT", "/file?path=/tmp/go", "", 200),
    ("POST", "/poll", "", 200),
    ("POST", "/interrupt", "", 409),
    ("PUT", "/file?path=/tmp/x&expected_bytes=0", "data", 409),
    ("PUT", "/file?path=/tmp/x", "data", 200),
    ("GET", "/file?path=/tmp/x&offset=1&max_bytes=2", "", 200),
    ("GET", "/info?path=/tmp/x", "", 200),
    ("GET", "/entries?path=/tmp&depth=1", "", 200),
    ("GET", "/archive?path=/tmp&exclude=%5B%5D", "", 200),
    ("POST", "/kill", "", 200),
    ("DELETE", "/file?path=/tmp/x", "", 200),
    ("POST", "/snapshot", "", 200),
    ("DELETE", "", "", 200),
]
FIRST_META = {"exit_code", "timed_out", "oom", "session_restarted", "cwd", "cwd_missing", "seconds", "head"}


async def test_g8_an_old_client_works_with_this_server(url: str) -> None:
    name, snapshot = uuid.uuid4().hex, ""
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=100) as http:
        for number, (method, path, content, status) in enumerate(FIRST):
            headers = {"idempotency-key": f"{name}-{number}"} if method != "GET" else {}
            answer = await http.request(method, f"/sandboxes/{name}{path}", content=content, headers=headers)
            assert answer.status_code == status, (path, answer.text)
            if path.startswith("/exec") and "soft" not in path:
                meta = json.loads(answer.headers["skyenv-meta"])
                assert meta.keys() >= FIRST_META
                assert (meta["exit_code"], meta["cwd"], answer.content) == (0, "/tmp", b"1\n")
            elif path == "/snapshot":
                snapshot = json.loads(answer.headers["skyenv-meta"])["snapshot"]
            elif status == 409:
                assert answer.json()["code"] in ("busy", "conflict")
        assert (await http.delete(f"/snapshots/{snapshot}")).status_code == 200
        assert (await http.post("/leases", content=json.dumps([name]))).status_code == 200


async def test_g8_a_newer_client_works_with_this_server(url: str) -> None:
    """Headers, query parameters and a minor version that are not known yet are ignored; another major is refused."""
    headers = {**HEADERS, "skyenv-future": "1", "skyenv-version": "1.999"}
    name = uuid.uuid4().hex
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=100) as http:
        assert (await http.put(f"/sandboxes/{name}?future=1", content="{}")).status_code == 200
        key = {"idempotency-key": "k"}
        answer = await http.post(f"/sandboxes/{name}/exec?future=1&timeout=60", content="echo ok", headers=key)
        assert (answer.status_code, answer.content) == (200, b"ok\n")
        assert (await http.get("/health", headers={"skyenv-version": "2.0"})).status_code == 400
        assert (await http.delete(f"/sandboxes/{name}")).status_code == 200
        unknown = await http.put(f"/sandboxes/{uuid.uuid4().hex}", content='{"future": 1}')
        assert (unknown.status_code, unknown.json()["code"]) == (422, "config")
        assert "future" in unknown.json()["message"]


class OldServer:
    """This node as its first release was: it knows the first fields of a creation and nothing of newer headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.creations: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = [pair for pair in scope["headers"] if not pair[0].startswith(b"skyenv-")]

        async def hear() -> Message:
            message = await receive()
            if scope["method"] == "PUT" and scope["path"].count("/") == 2 and message.get("body"):
                self.creations.append(json.loads(message["body"]))
            return message

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, _first_meta(value) if name == b"skyenv-meta" else value)
                    for name, value in message["headers"]
                    if name != b"skyenv-version"
                ]
            await send(message)

        await self._app(scope, hear, tell)


def _first_meta(value: bytes) -> bytes:
    known = FIRST_META | {"running", "output_bytes", "info", "snapshot", "lost"}
    return json.dumps({key: field for key, field in json.loads(value).items() if key in known}).encode()


async def test_g8_this_client_works_with_an_old_server() -> None:
    node = Node(backends.get("local"))
    async with node.open():
        server = OldServer(app_for(node))
        transport = httpx.ASGITransport(server, raise_app_exceptions=False)
        async with Sender(transport, "http://node", {}) as sender:
            client = SandboxClient(sender)
            async with client.sandbox(env={"A": "1"}, ttl=60.0) as box:
                assert (await box.exec("echo $A; cd /tmp")).output == "1\n"
                await box.write_file("/tmp/x", b"data")
                assert await box.read_file("/tmp/x") == b"data"
                silent = await box.exec(f"{UNTIL_GO}; echo late", soft_timeout=0.2)
                assert silent.running
                await box.write_file("/tmp/go", b"")
                assert (await box.poll()).output == "late\n"
                with pytest.raises(EnvError):
                    await box.interrupt()
                with pytest.raises(SandboxPathError):
                    await box.read_file("/missing")
            with pytest.raises(SandboxLost):
                await box.exec("true")
            assert [body.keys() for body in server.creations] == [{"image", "snapshot", "env", "spec"}]
            assert server.creations[0]["spec"] == {"ttl": 60.0}


async def test_g11_a_binary_patch_survives_the_way(url: str) -> None:
    async with session(url) as box:
        await box.exec(f"git init -q r && cd r && cp /bin/true t && git add . && {COMMIT}")
        await box.exec("head -c 5000 /dev/urandom > t; head -c 3000 /dev/urandom > new.png; git add -A")
        await box.exec("git diff --cached --binary > /root/p; git reset -q --hard")
        await box.write_file("/root/q", await box.read_file("/root/p"))
        command = "git apply --whitespace=nowarn --index /root/q; git diff --cached --binary | cmp - /root/p"
        result = await box.exec(command)
        assert (result.exit_code, result.output) == (0, "")


async def test_g13_odd_text_survives_the_way(url: str) -> None:
    """CRLF, no newline at the end, a file name that is not text, `core.autocrlf`: a patch is bytes."""
    async with session(url) as box:
        await box.exec(f"git init -q r && cd r && printf 'a\\r\\nb\\r\\n' > c && git add . && {COMMIT}")
        await box.exec("printf 'a\\r\\nB\\r\\nend' > c; printf x > $'n\\377\\nm'; git add -A")
        for setting in ("false", "true", "input"):
            await box.exec(f"git config core.autocrlf {setting}")
            diff = await box.exec("git diff --cached --binary > /root/p; wc -c < /root/p")
            patch = await box.read_file("/root/p")
            assert len(patch) == int(diff.output)
            assert b"+B\r\n" in patch
            assert patch.endswith(b"\n\\ No newline at end of file\n")
            await box.write_file("/root/q", patch)
            again = (
                "git stash -q; git -c core.autocrlf=false apply --index /root/q; git diff --cached --binary > /root/s"
            )
            await box.exec(f"{again}; git stash drop -q")
            assert (await box.exec("cmp /root/p /root/s")).exit_code == 0


SERVER = "import http.server as h; h.HTTPServer(('{}', 8124), h.SimpleHTTPRequestHandler).serve_forever()"
REACH = "import socket; socket.create_connection(('{}', 8124), 50); print('ok')"
WAIT = "for i in $(seq 500); do (exec 3<>/dev/tcp/127.0.0.1/8124) 2>/dev/null && break; sleep 0.1; done"
ROWS: dict[str, list[Run]] = {
    "G16 loopback works by every name": [
        Run(f'python3 -c "{SERVER.format("127.0.0.1")}" >/dev/null 2>&1 &'),
        Run(WAIT),
        *(Run(f'python3 -c "{REACH.format(name)}"', "ok\n") for name in ("127.0.0.1", "localhost")),
    ],
    "G16 loopback of the newer version": [
        Run(
            "python3 -c \"import socket; s = socket.create_server(('::1', 0), family=socket.AF_INET6);"
            " socket.create_connection(s.getsockname()[:2], 50); print('ok')\"",
            "ok\n",
        ),
    ],
    "G16 names of nowhere fail at once": [
        Run("getent hosts nowhere.invalid", code=2),
        Run("python3 -c \"import socket; socket.getaddrinfo('nowhere.invalid', 80)\"", code=1),
        Run("getent hosts localhost", lambda out: "localhost" in out),
    ],
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
async def test_session_survives(url: str, row: str) -> None:
    await run_all(url, ROWS[row])
