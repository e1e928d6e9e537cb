"""Images in a registry: the distribution protocol, as far as pulling needs it.

What arrives is checked against its digest while it arrives. A broken download goes on where it stopped, if the server
lets it. What may pass by itself (429, 5xx, a lost connection, a damaged answer) is tried again with a growing pause
and no longer than `longest_wait` at a time; anything else is a ConfigError. Mirrors are asked first. Reading is
idempotent, which is why these retries may live here and not in the client.
"""

from __future__ import annotations

import hashlib
import ipaddress
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import anyio
import anyio.to_thread
import httpx

from skyenv.errors import ConfigError, SandboxUnavailable
from skyenv.remote.images import credentials, manifests
from skyenv.remote.images.manifests import INDEXES, MANIFESTS, Descriptor, Manifest
from skyenv.remote.images.references import DOCKER_HUB, Reference
from skyenv.remote.images.settings import ImageSettings
from skyenv.remote.images.sources import Blob, Progress

T = TypeVar("T")
CHUNK = 1 << 20
FIRST_WAIT = 0.25
_HUB = "registry-1.docker.io"
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="([^"]*)"')


class _Again(Exception):
    """Something that may pass; `wait` is what the server asked for, `moved` that there was progress."""

    def __init__(self, message: str, wait: float | None = None, *, moved: bool = False) -> None:
        super().__init__(message)
        self.wait, self.moved = wait, moved


class _Missing(Exception):
    """The server does not have it."""


def is_loopback(host: str) -> bool:
    """Whether a registry's host (with or without port) is this machine."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass
class Endpoint:
    """A server that holds the repository: a mirror or the registry itself."""

    url: str
    host: str
    authorization: str | None = None


def endpoints(host: str, settings: ImageSettings) -> list[Endpoint]:
    """Where to ask for a registry's images, in order."""
    scheme = "http" if is_loopback(host) or host in settings.insecure else "https"
    own = Endpoint(f"{scheme}://{_HUB if host == DOCKER_HUB else host}", host)
    mirrors = [url.rstrip("/") for url in settings.mirrors.get(host, ())]
    return [*(Endpoint(url, url.partition("://")[2].partition("/")[0]) for url in mirrors), own]


class RegistrySource:
    """One image of a registry. `http` belongs to whoever made this; see `client`."""

    def __init__(self, http: httpx.AsyncClient, reference: Reference, settings: ImageSettings) -> None:
        self._http, self._settings = http, settings
        self._reference, self._what = reference, str(reference)
        self._endpoints = endpoints(reference.host, settings)
        self._found: Manifest | None = None

    async def manifest(self) -> Manifest:
        """Ask for it, and for the one of this architecture if it is a list."""
        name = self._reference.digest or self._reference.tag or "latest"
        data, media_type = await self._manifest(name)
        while manifests.is_index(found := manifests.load(data, self._what), media_type):
            data, media_type = await self._manifest(manifests.choose(found, self._what).digest)
        self._found = manifests.parse_manifest(data, self._what)
        return self._found

    async def _manifest(self, name: str) -> tuple[bytes, str]:
        async def ask(endpoint: Endpoint) -> tuple[bytes, str]:
            headers = {"accept": ", ".join((*MANIFESTS, *INDEXES))}
            async with self._get(endpoint, f"manifests/{name}", headers) as response:
                data = await _read(response, manifests.MAX_MANIFEST)
                media_type = response.headers.get("content-type", "").partition(";")[0]
            if name.startswith("sha256:") and manifests.digest_of(data) != name:
                raise _Again(f"the manifest is not {name}")
            return data, media_type

        return await self._patiently(ask)

    async def config(self) -> bytes:
        """Download it."""
        found = self._found or await self.manifest()
        if found.config.size > manifests.MAX_CONFIG:
            raise ConfigError(f"image {self._what}: its configuration is {found.config.size} bytes long")

        async def ask(endpoint: Endpoint) -> bytes:
            async with self._get(endpoint, f"blobs/{found.config.digest}", {}) as response:
                data = await _read(response, manifests.MAX_CONFIG)
            if manifests.digest_of(data) != found.config.digest:
                raise _Again("the configuration arrived damaged")
            return data

        return await self._patiently(ask)

    async def layer(self, index: int, target: Path, progress: Progress) -> Blob:
        """Download it into `target`."""
        found = self._found or await self.manifest()
        wanted = found.layers[index]
        download = _Download(wanted, target, progress)
        try:
            await self._patiently(lambda endpoint: self._download(endpoint, download))
        finally:
            download.close()
        return Blob(target, 0, wanted.size, temporary=True)

    async def _download(self, endpoint: Endpoint, download: _Download) -> None:
        start = download.size
        headers = {"range": f"bytes={start}-"} if start else {}
        try:
            async with self._get(endpoint, f"blobs/{download.wanted.digest}", headers) as response:
                if response.status_code != 206 or not _starts_at(response, start):
                    await download.restart()
                async for data in response.aiter_raw():
                    await download.add(data)
        except _Again as error:
            await download.flush()
            error.moved = download.size > start
            raise
        await download.flush()
        await download.check()

    @asynccontextmanager
    async def _get(self, endpoint: Endpoint, path: str, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
        """A successful answer. _Missing for 404, _Again for what may pass, ConfigError for the rest."""
        url = f"{endpoint.url}/v2/{self._reference.repository}/{path}"
        try:
            for attempt in range(2):
                own = {"authorization": endpoint.authorization} if endpoint.authorization else {}
                plain = {"accept-encoding": "identity"}
                async with self._http.stream("GET", url, headers={**plain, **headers, **own}) as response:
                    if response.status_code == 401 and attempt == 0:
                        await self._authorize(endpoint, response.headers.get("www-authenticate", ""))
                        continue
                    _check(response, self._what)
                    yield response
                    return
        except httpx.TransportError as error:
            raise _Again(f"{endpoint.host}: {type(error).__name__}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"image {self._what}: {endpoint.host}: {error}") from error

    async def _authorize(self, endpoint: Endpoint, challenge: str) -> None:
        """Get what the server asks for: a token, or the name and password themselves."""
        kind = challenge.partition(" ")[0].lower()
        known = await credentials.find(endpoint.host, self._settings.docker_config)
        if kind == "basic" and known is not None:
            request = httpx.Request("GET", endpoint.url)
            signed = next(httpx.BasicAuth(*known).auth_flow(request))
            endpoint.authorization = signed.headers["authorization"]
        elif kind == "bearer":
            endpoint.authorization = f"Bearer {await self._token(challenge, known)}"
        elif kind == "basic":
            raise ConfigError(
                f"image {self._what}: {endpoint.host} asks for a password; log in with docker, podman or skopeo"
            )

    async def _token(self, challenge: str, known: credentials.Credentials | None) -> str:
        fields = dict(_CHALLENGE.findall(challenge))
        realm = httpx.URL(fields.get("realm", ""))
        if realm.scheme != "https" and not is_loopback(realm.host) and realm.host not in self._settings.insecure:
            raise ConfigError(f"image {self._what}: the registry wants credentials sent to {str(realm)!r}, without TLS")
        query = {"scope": f"repository:{self._reference.repository}:pull"}
        query |= {"service": fields["service"]} if "service" in fields else {}
        answer = await self._http.get(realm, params=query, auth=httpx.BasicAuth(*known) if known else None)
        _check(answer, self._what)
        found = manifests.load(answer.content, self._what)
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str):
            raise ConfigError(f"image {self._what}: {realm.host} gave no token")
        return token

    async def _patiently(self, ask: Callable[[Endpoint], Awaitable[T]]) -> T:
        """Ask one server after the other, each with patience."""
        problem: Exception | None = None
        for endpoint in self._endpoints:
            try:
                return await self._insist(endpoint, ask)
            except (SandboxUnavailable, _Missing) as error:
                problem = problem if isinstance(error, _Missing) and problem is not None else error
        if isinstance(problem, SandboxUnavailable):
            raise problem
        raise ConfigError(f"image {self._what}: there is none of that name, or it cannot be seen without credentials")

    async def _insist(self, endpoint: Endpoint, ask: Callable[[Endpoint], Awaitable[T]]) -> T:
        failures = 0
        while True:
            try:
                return await ask(endpoint)
            except _Again as error:
                failures = 1 if error.moved else failures + 1
                pause = min(FIRST_WAIT * 2 ** (failures - 1), self._settings.longest_wait) * random.uniform(0.5, 1)
                wait = pause if error.wait is None else error.wait
                if failures >= self._settings.attempts or wait > self._settings.longest_wait:
                    text = f"image {self._what}: {error}"
                    raise SandboxUnavailable(text, retry_after=max(wait, 1.0), reason="registry") from error
                await anyio.sleep(wait)


class _Download:
    """A blob that grows in a file, over as many attempts as it takes."""

    def __init__(self, wanted: Descriptor, target: Path, progress: Progress) -> None:
        self.wanted, self.size = wanted, 0
        self._target, self._progress = target, progress
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._buffer = bytearray()

    async def restart(self) -> None:
        """From the beginning."""
        self.close()
        self._forget()
        self._file = await anyio.to_thread.run_sync(self._target.open, "wb")
        self._digest = hashlib.sha256()

    async def add(self, data: bytes) -> None:
        """Take what arrived. _Again when it is more than there should be."""
        if self.size + len(data) > self.wanted.size:
            self._forget()
            raise _Again(f"blob {self.wanted.digest} is longer than {self.wanted.size} bytes")
        self._buffer += data
        self.size += len(data)
        self._progress(len(data))
        if len(self._buffer) >= CHUNK:
            await self.flush()

    async def flush(self) -> None:
        """Write what arrived."""
        data, self._buffer = bytes(self._buffer), bytearray()
        await anyio.to_thread.run_sync(self._write, data)

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        if self._file is not None:
            self._file.write(data)

    def _forget(self) -> None:
        """Nothing of it can be used."""
        self._progress(-self.size)
        self.size, self._buffer = 0, bytearray()

    async def check(self) -> None:
        """All of it is there and is what was asked for; else _Again."""
        if self.size < self.wanted.size:
            raise _Again(f"blob {self.wanted.digest} ended after {self.size} of {self.wanted.size} bytes")
        if f"sha256:{self._digest.hexdigest()}" != self.wanted.digest:
            self._forget()
            raise _Again(f"blob {self.wanted.digest} arrived damaged")
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _starts_at(response: httpx.Response, start: int) -> bool:
    return start > 0 and response.headers.get("content-range", "").startswith(f"bytes {start}-")


async def _read(response: httpx.Response, limit: int) -> bytes:
    data = bytearray()
    async for part in response.aiter_raw():
        data += part
        if len(data) > limit:
            raise _Again(f"an answer is longer than {limit} bytes")
    return bytes(data)


def _check(response: httpx.Response, what: str) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    host = response.request.url.host
    if status == 404:
        raise _Missing
    if status == 416:
        raise _Again(f"{host} cannot go on in the middle of a blob")
    if status == 429 or status >= 500:
        raise _Again(f"{host} answered {status}", _retry_after(response))
    if status in (401, 403):
        raise ConfigError(f"image {what}: {host} refuses it ({status}); it does not exist, or log in first")
    raise ConfigError(f"image {what}: {host} answered {status}")


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else None


def client(settings: ImageSettings) -> httpx.AsyncClient:
    """What registries are asked with. Enter it."""
    timeout = httpx.Timeout(settings.stall_timeout, pool=None)
    return httpx.AsyncClient(timeout=timeout, follow_redirects=True, max_redirects=5)
