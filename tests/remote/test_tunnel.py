"""A port inside a sandbox that leads to one address: real servers outside, real clients inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import pytest
from fleet_processes import fleet_in

from skyenv.core import Sandbox
from skyenv.errors import ConfigError
from skyenv.remote.client import connect

# A client that needs nothing but bash: one request, the body of the answer without its head.
ASK = """exec 3<>/dev/tcp/127.0.0.1/{port} && printf 'POST {path} HTTP/1.0\\r\\nContent-Length: {size}\\r\\n\\r\\n' >&3
head -c {size} /dev/zero | tr '\\0' x >&3
sed '1,/^.$/d' <&3; exec 3>&-"""


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was sent, or with so many bytes as the path says."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        wanted = self.path.lstrip("/")
        answer = b"y" * int(wanted) if wanted.isdigit() else b"%d bytes" % len(body)
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


async def ask(box: Sandbox, port: int, path: str = "/", size: int = 5) -> str:
    result = await box.exec(ASK.format(port=port, path=path, size=size), max_output_bytes=8 << 20)
    assert result.exit_code == 0, result.output
    return result.output


async def test_a_port_leads_to_the_target_and_nowhere_else(url: str, target: str) -> None:
    async with connect(url, "secret") as client, client.sandbox() as box:
        direct = await box.exec(f"exec 3<>/dev/tcp/{target.replace(':', '/')}")
        assert direct.exit_code != 0
        port = await box.tunnel(target)
        assert [await ask(box, port) for _ in range(3)] == ["5 bytes"] * 3
        assert await box.tunnel(target, port=port) == port
        chosen = await box.tunnel(target, port=4000)
        assert (chosen, await ask(box, 4000)) == (4000, "5 bytes")
        assert (await box.exec("exec 3<>/dev/tcp/127.0.0.1/4001")).exit_code != 0


async def test_large_bodies_pass_both_ways(url: str, target: str) -> None:
    async with connect(url, "secret") as client, client.sandbox() as box:
        port = await box.tunnel(target)
        assert await ask(box, port, size=3_000_000) == "3000000 bytes"
        assert await ask(box, port, "/3000000") == "y" * 3_000_000


async def test_many_connections_at_a_time(url: str, target: str) -> None:
    async with connect(url, "secret") as client, client.sandbox() as box:
        port = await box.tunnel(target)
        one = ASK.format(port=port, path="/", size=1000)
        result = await box.exec(f"for i in $(seq 20); do ( {one} ; echo ) & done; wait")
        assert result.output.count("1000 bytes") == 20


async def test_rootless(rootless_url: str, target: str) -> None:
    async with connect(rootless_url, "secret") as client, client.sandbox() as box:
        assert await ask(box, await box.tunnel(target)) == "5 bytes"


async def test_a_sandbox_that_isolates_nothing_has_one_too(target: str) -> None:
    async with connect(backend="process") as client, client.sandbox() as box, client.sandbox() as other:
        ports = [await box.tunnel(target), await other.tunnel(target)]
        assert ports[0] != ports[1]
        assert await ask(box, ports[0]) == "5 bytes"
        with pytest.raises(ConfigError, match="in use"):
            await other.tunnel(target, port=ports[0])


async def test_a_target_that_is_not_there_ends_the_connection(target: str) -> None:
    async with connect() as client, client.sandbox() as box:
        port = await box.tunnel("127.0.0.1:1")
        result = await box.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}; cat <&3; echo ended", timeout=30)
        assert result.output == "ended\n"
        with pytest.raises(ConfigError, match=r"leads to 127\.0\.0\.1:1 already"):
            await box.tunnel(target, port=port)


async def test_what_is_killed_inside_and_what_goes_on(target: str) -> None:
    async with connect() as client, client.sandbox() as box:
        port = await box.tunnel(target)
        await box.kill_processes()
        assert await ask(box, port) == "5 bytes"
        await box.pause()
        assert await ask(box, port) == "5 bytes"
        snapshot = await box.snapshot()
        await box.rollback(snapshot)
        assert (await box.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}")).exit_code != 0


async def test_a_lease_ends_whatever_waits_in_a_tunnel(target: str) -> None:
    async with connect() as client, client.sandbox(ttl=1) as box:
        await box.tunnel(target)
        client._leases.clear()
        with anyio.fail_after(100):
            while (await client.health())["sandboxes"]:
                await anyio.sleep(0.1)


@pytest.mark.parametrize("target", ["127.0.0.1", "x:y", "h:0", "h:70000", ":80"])
async def test_a_target_is_host_and_port(target: str) -> None:
    async with connect() as client, client.sandbox() as box:
        with pytest.raises(ConfigError, match="HOST:PORT"):
            await box.tunnel(target)


async def test_a_node_allows_what_it_was_told(target: str, tmp_path: Path) -> None:
    with fleet_in(tmp_path) as fleet:
        fleet.start("node", "serve", "--port", "0", "--tunnel", target)
        async with connect(fleet.urls["node"]) as client, client.sandbox() as box:
            assert await ask(box, await box.tunnel(target)) == "5 bytes"
            with pytest.raises(ConfigError, match=r"--tunnel 127\.0\.0\.1:22"):
                await box.tunnel("127.0.0.1:22")
