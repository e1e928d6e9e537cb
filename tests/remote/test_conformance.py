"""The conformance suite over every way to reach a sandbox: in this process and over a socket, each backend and mode."""

from __future__ import annotations

import pytest

from skyenv.core import SandboxProvider
from skyenv.errors import ConfigError
from skyenv.remote.client import connect
from skyenv.testing import check_sandbox


async def test_local_in_process() -> None:
    async with connect() as client:
        health = await client.health()
        assert (health["backend"], health["isolated"]) == ("local", True)
        await check_sandbox(client)


async def test_local_over_a_socket(local_url: str) -> None:
    async with connect(local_url, "secret") as client:
        assert (await client.health())["mode"] == "root"
        await check_sandbox(client)


async def test_rootless_over_a_socket(rootless_url: str) -> None:
    async with connect(rootless_url, "secret") as client:
        assert (await client.health())["mode"] == "rootless"
        await check_sandbox(client)


@pytest.mark.docker
async def test_docker_over_a_socket(docker_url: str) -> None:
    async with connect(docker_url, "secret") as client:
        assert (await client.health())["backend"] == "docker"
        await check_sandbox(client)


async def test_process_in_process() -> None:
    async with connect(backend="process") as client:
        health = await client.health()
        assert health["isolated"] is False
        assert "isolates nothing" in health["notes"][0]
        await check_sandbox(client, isolated=False)


async def test_the_suite_names_what_fails() -> None:
    """A provider that isolates nothing must not pass for one that does."""
    async with connect(backend="process") as client:
        provider: SandboxProvider = client
        with pytest.raises(ExceptionGroup) as caught:
            await check_sandbox(provider)
    names = [str(error).partition(":")[0] for error in caught.value.exceptions]
    assert "sandboxes have a root of their own" in names
    assert "twins start with the same files" in names


async def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="'local'"):
        async with connect(backend="dokcer"):
            pass
