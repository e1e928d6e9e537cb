"""A container engine (docker, or podman's socket that speaks the same) from async code: create, commit, delete, images.

Commands never go through an engine. Its SDK blocks, so each call runs in a thread; what it raises is translated here,
so nothing of the SDK's leaves this module.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from skyenv.errors import ConfigError, SandboxUnavailable

T = TypeVar("T")
TIMEOUT = 120.0
CALLS_AT_A_TIME = 16
RETRY_AFTER = 5.0
RATE_LIMITED = 30.0
DEFAULT_HOST = "unix:///var/run/docker.sock"
_LIMITED = re.compile(r"toomanyrequests|too many requests|\b429\b", re.IGNORECASE)
_MISSING = re.compile(
    r"not found|no such image|manifest unknown|name unknown|does not exist|access denied|invalid reference"
    r"|no matching manifest|\b404\b",
    re.IGNORECASE,
)
# A registry that cannot be reached says "not found" too, of its host name.
_UNREACHABLE = re.compile(r"no such host|dial tcp|timeout|EOF|\b5\d\d\b|connection re", re.IGNORECASE)


def engine_host() -> str:
    """Where the engine is expected: DOCKER_HOST, or the usual socket."""
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


class ContainerEngine:
    """An engine that answers. Made by `reach`. All methods raise SandboxUnavailable when it does not (any more)."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._threads = anyio.CapacityLimiter(CALLS_AT_A_TIME)

    async def call(self, what: str, work: Callable[[], T]) -> T:
        """Run one blocking call in a thread; it is not interrupted by cancellation."""

        def translated() -> T:
            with translated_errors(what):
                return work()

        return await anyio.to_thread.run_sync(translated, limiter=self._threads)

    async def info(self) -> dict[str, Any]:
        """What the engine tells of itself."""
        return await self.call("info", self._api.info)

    async def image(self, reference: str) -> dict[str, Any] | None:
        """An image that is here, inspected; None when it is not."""
        return await self._found(f"image {reference}", lambda: self._api.inspect_image(reference))

    async def _found(self, what: str, work: Callable[[], T]) -> T | None:
        from docker.errors import NotFound

        def attempt() -> T | None:
            with contextlib.suppress(NotFound):
                return work()
            return None

        return await self.call(what, attempt)

    async def tags(self) -> list[str]:
        """The tags of all images that are here."""
        images = await self.call("images", self._api.images)
        return sorted(tag for image in images for tag in image["RepoTags"] or () if tag != "<none>:<none>")

    async def pull(self, reference: str) -> None:
        """Fetch an image from its registry. ConfigError when there is none, SandboxUnavailable when not now."""
        repository, tag = split_reference(reference)

        def work() -> None:
            for line in self._api.pull(repository, tag=tag, stream=True, decode=True):
                if "error" in line:
                    raise pull_error(reference, str(line["error"]))

        await self.call(f"pull of {reference}", work)

    async def start(self, name: str, image: str, host: dict[str, Any], **options: Any) -> tuple[str, int]:
        """Create and start a container; its id and the pid of its first process. Whoever calls removes it."""

        def work() -> tuple[str, int]:
            host_config = self._api.create_host_config(**host)
            made = self._api.create_container(image, name=name, host_config=host_config, **options)
            self._api.start(name)
            return str(made["Id"]), int(self._api.inspect_container(name)["State"]["Pid"])

        return await self.call(f"start of {image}", work)

    async def remove(self, name: str) -> None:
        """Kill and remove a container with its volumes. Fine when there is none, or it is being removed already."""
        from docker.errors import APIError

        def work() -> None:
            try:
                self._api.remove_container(name, v=True, force=True)
            except APIError as error:
                if error.status_code not in (404, 409):
                    raise

        await self.call(f"removal of {name}", work)

    async def containers(self, label: str) -> list[tuple[str, Mapping[str, str]]]:
        """Names and labels of all containers, in whatever state, that have this label (`key` or `key=value`)."""
        found = await self.call("list", lambda: self._api.containers(all=True, filters={"label": label}))
        return [(each["Names"][0].lstrip("/"), each["Labels"] or {}) for each in found if each["Names"]]

    async def commit(self, name: str, reference: str, labels: Mapping[str, str]) -> None:
        """Keep the files of a container, in which nothing moves, as an image."""
        repository, tag = split_reference(reference)
        conf = {"Labels": dict(labels)}
        work = lambda: self._api.commit(name, repository=repository, tag=tag, pause=False, conf=conf)  # noqa: E731
        await self.call(f"snapshot of {name}", work)

    async def remove_image(self, reference: str) -> bool:
        """Untag an image and delete what nobody needs; False when a container still does. Fine when there is none."""
        from docker.errors import APIError

        def work() -> bool:
            try:
                self._api.remove_image(reference, force=True)
            except APIError as error:
                if error.status_code not in (404, 409):
                    raise
                return bool(error.status_code == 404)
            return True

        return await self.call(f"removal of {reference}", work)

    async def snapshots(self, label: str) -> list[tuple[str, Mapping[str, str]]]:
        """References (an id where nothing tags it any more) and labels of all images with this label."""
        found = await self.call("images", lambda: self._api.images(filters={"label": label}))
        return [
            (([t for t in each["RepoTags"] or () if "<none>" not in t] or [each["Id"]])[0], each["Labels"] or {})
            for each in found
        ]


@asynccontextmanager
async def reach() -> AsyncIterator[ContainerEngine]:
    """The engine at DOCKER_HOST for the block. ConfigError saying what to do when none answers."""
    api = await anyio.to_thread.run_sync(_connect)
    try:
        yield ContainerEngine(api)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(api.close)


def _connect() -> Any:
    try:
        import docker
    except ImportError as error:
        raise ConfigError("backend 'docker' needs its SDK: pip install 'skyenv[docker]'") from error
    try:
        api = docker.APIClient(**docker.utils.kwargs_from_env(), version="auto", timeout=TIMEOUT)
        api.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise ConfigError(
            f"no container engine answers at {engine_host()}: start one (dockerd, or `podman system service`) or set "
            f"DOCKER_HOST; {error}"
        ) from error
    return api


@contextlib.contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Turn the SDK's exceptions into ours."""
    import docker
    import requests

    try:
        yield
    except docker.errors.NotFound as error:
        raise ConfigError(f"{what}: {error.explanation}") from error
    except docker.errors.APIError as error:
        raise pull_error(what, str(error.explanation)) from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise SandboxUnavailable(f"{what}: the engine does not answer: {error}", RETRY_AFTER) from error


def pull_error(what: str, text: str) -> ConfigError | SandboxUnavailable:
    """What an engine's complaint means: nothing will help, or it may work later."""
    if _LIMITED.search(text):
        return SandboxUnavailable(f"{what}: the registry limits requests: {text}", RATE_LIMITED, reason="registry")
    if _MISSING.search(text) and not _UNREACHABLE.search(text):
        return ConfigError(f"{what}: {text}")
    return SandboxUnavailable(f"{what}: {text}", RETRY_AFTER)


def split_reference(reference: str) -> tuple[str, str]:
    """Repository and tag (or digest) of an image's name; the tag is `latest` when none is given."""
    if "@" in reference:
        repository, _at, digest = reference.partition("@")
        return repository, digest
    repository, colon, tag = reference.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (reference, "latest")
