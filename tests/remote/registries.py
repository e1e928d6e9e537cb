"""Images written by hand, a real registry on loopback to push them to, and a proxy before it that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import zstandard

from tests.ports import free_port

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
NAME = "org.opencontainers.image.ref.name"
TLS_HANDSHAKE = b"\x16"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def member(name: str, content: bytes | None = None, **fields: Any) -> tuple[tarfile.TarInfo, bytes | None]:
    """A member of a layer: a file with `content`, or whatever `fields` (type, linkname, mode, uid...) make it."""
    info = tarfile.TarInfo(name)
    info.mode = 0o755 if fields.get("type") == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    info.size = len(content or b"")
    return info, content


def layer(*members: tuple[tarfile.TarInfo, bytes | None]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content) if content else None)
    return out.getvalue()


COMPRESS = {"plain": bytes, "gzip": lambda data: gzip.compress(data, 1, mtime=0), "zstd": zstandard.compress}


@dataclass
class Built:
    """An image in memory: blobs by digest, and its manifest."""

    layers: Sequence[bytes]
    compression: str = "gzip"
    architecture: str = "amd64"
    config: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifest: bytes = b""

    def __post_init__(self) -> None:
        packed = [COMPRESS[self.compression](each) for each in self.layers]
        config = json.dumps(
            {
                "architecture": self.architecture,
                "os": "linux",
                "config": self.config,
                "rootfs": {"type": "layers", "diff_ids": [digest(each) for each in self.layers]},
            }
        ).encode()
        self.blobs = {digest(each): each for each in (*packed, config)}
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": descriptor(config, "application/vnd.oci.image.config.v1+json"),
                "layers": [descriptor(each, "application/vnd.oci.image.layer.v1.tar") for each in packed],
            }
        ).encode()

    def write_layout(self, path: Path, tag: str | None = None) -> Path:
        """As an OCI layout directory."""
        blobs = path / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        for name, data in {**self.blobs, digest(self.manifest): self.manifest}.items():
            (blobs / name.removeprefix("sha256:")).write_bytes(data)
        entry = descriptor(self.manifest, MANIFEST) | ({"annotations": {NAME: tag}} if tag else {})
        index = path / "index.json"
        entries = json.loads(index.read_text())["manifests"] if index.exists() else []
        index.write_text(json.dumps({"schemaVersion": 2, "manifests": [*entries, entry]}))
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return path

    def push(self, url: str, repository: str, tag: str) -> None:
        """To a registry."""
        with httpx.Client(base_url=f"{url}/v2/{repository}", timeout=100) as http:
            for name, data in self.blobs.items():
                place = http.post("/blobs/uploads/").raise_for_status().headers["location"]
                http.put(httpx.URL(place).copy_merge_params({"digest": name}), content=data).raise_for_status()
            put_manifest(http, tag, self.manifest, MANIFEST)


def put_manifest(http: httpx.Client, tag: str, data: bytes, kind: str) -> None:
    http.put(f"/manifests/{tag}", content=data, headers={"content-type": kind}).raise_for_status()


def descriptor(data: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest(data), "size": len(data)}


def index_of(images: dict[str, Built]) -> bytes:
    """A list of one image for each architecture."""
    entries = [
        descriptor(image.manifest, MANIFEST) | {"platform": {"architecture": name, "os": "linux"}}
        for name, image in images.items()
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()


@contextlib.contextmanager
def registry(folder: Path, password_file: Path | None = None) -> Iterator[str]:
    """Debian's docker-registry on loopback; its URL. With `password_file` (htpasswd) it wants basic authorization."""
    program = shutil.which("docker-registry")
    assert program is not None, "docker-registry is not installed"
    port = free_port()
    (folder / "config.yml").write_text("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {}}\n")
    env = {
        "PATH": os.environ["PATH"],
        "REGISTRY_HTTP_ADDR": f"127.0.0.1:{port}",
        "REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY": str(folder / "data"),
    }
    if password_file is not None:
        env |= {"REGISTRY_AUTH": "htpasswd", "REGISTRY_AUTH_HTPASSWD_REALM": "here"}
        env["REGISTRY_AUTH_HTPASSWD_PATH"] = str(password_file)
    process = subprocess.Popen(
        [program, "serve", str(folder / "config.yml")], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=300)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{url}/v2/")
            return
        time.sleep(0.02)
    raise AssertionError("the registry did not start")


@dataclass
class Fault:
    """What happens to the next `times` requests whose path matches: an error status, or a body that goes wrong."""

    path: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    flip_at: int | None = None
    stall_at: int | None = None
    deaf_to_ranges: bool = False


class Proxy:
    """Forwards to a registry, with faults. Counts what was asked for."""

    def __init__(self, upstream: str) -> None:
        self._http = httpx.AsyncClient(base_url=upstream, timeout=100)
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, str]] = []
        self.host = ""
        self.token: str | None = None

    def count(self, pattern: str) -> int:
        return sum(1 for path, _range in self.asked if re.search(pattern, path))

    def _fault(self, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            first = await reader.readexactly(1)
            if first == TLS_HANDSHAKE:  # an engine tries that first
                raise ConnectionResetError
            head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            path = head[0].split(" ")[1]
            headers: dict[str, str] = {}
            for key, _colon, value in (line.partition(":") for line in head[1:] if line):
                known = headers.get(key.lower())
                headers[key.lower()] = f"{known}, {value.strip()}" if known else value.strip()
            self.asked.append((path, headers.get("range", "")))
            if self.token is not None and self._refuse(path, headers, writer):
                return
            await self._answer(path, headers, self._fault(path), writer)
        writer.close()

    def _refuse(self, path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        """Want a token, which `/token` gives to everybody."""
        if path.startswith("/token"):
            body = json.dumps({"token": self.token}).encode()
            writer.write(_head(200, {"content-length": str(len(body))}) + body)
        elif headers.get("authorization") != f"Bearer {self.token}":
            challenge = f'Bearer realm="http://{self.host}/token",service="here"'
            writer.write(_head(401, {"content-length": "0", "www-authenticate": challenge}))
        else:
            return False
        writer.close()
        return True

    async def _answer(
        self, path: str, headers: dict[str, str], fault: Fault | None, writer: asyncio.StreamWriter
    ) -> None:
        if fault is not None and fault.status is not None:
            writer.write(_head(fault.status, {**fault.headers, "content-length": "0"}))
            return
        kept = {key: headers[key] for key in ("accept", "range", "authorization") if key in headers}
        if fault is not None and fault.deaf_to_ranges:
            kept.pop("range", None)
        response = await self._http.get(path, headers=kept)
        body = bytearray(response.content)
        names = ("content-type", "content-range", "docker-content-digest", "www-authenticate")
        back = {name: response.headers[name] for name in names if name in response.headers}
        writer.write(_head(response.status_code, {**back, "content-length": str(len(body))}))
        if fault is not None and fault.flip_at is not None:
            body[fault.flip_at] ^= 1
        end = fault.cut_at if fault is not None else None
        if fault is not None and fault.stall_at is not None:
            writer.write(body[: fault.stall_at])
            await writer.drain()
            await asyncio.sleep(60)
        writer.write(bytes(body[:end]))
        await writer.drain()


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} x", "connection: close", *(f"{key}: {value}" for key, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@contextlib.asynccontextmanager
async def proxied(upstream: str) -> AsyncIterator[Proxy]:
    """A faulty proxy before a registry; its `host` is what references name."""
    proxy = Proxy(upstream)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy._http.aclose()
