"""Credentials for registries, as docker keeps them: `auths`, `credHelpers` and `credsStore` of its config.json."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from skyenv.errors import ConfigError
from skyenv.remote.images.references import DOCKER_HUB

HELPER_TIMEOUT = 10.0
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io")


class Credentials(NamedTuple):
    """A name and a password or token."""

    user: str
    password: str


def config_file(chosen: Path | None) -> Path:
    """Where docker's configuration lies: chosen, or DOCKER_CONFIG, or in the home directory."""
    if chosen is not None:
        return chosen
    folder = os.environ.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"


async def find(host: str, chosen: Path | None) -> Credentials | None:
    """The credentials for a registry; None when there are none. ConfigError for a file that cannot be read."""
    path = config_file(chosen)
    try:
        config: dict[str, Any] = json.loads(await anyio.to_thread.run_sync(path.read_bytes))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    keys = _HUB_KEYS if host == DOCKER_HUB else (host, f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/")
    helpers = config.get("credHelpers") or {}
    for key in keys:
        helper = helpers.get(key) or (config.get("credsStore") if key in (config.get("auths") or {}) else None)
        if helper:
            return await _ask(str(helper), key)
        entry = (config.get("auths") or {}).get(key)
        if isinstance(entry, dict) and entry:
            return _decode(entry, path, key)
    return None


def _decode(entry: dict[str, Any], path: Path, key: str) -> Credentials:
    if "auth" not in entry:
        return Credentials(str(entry.get("username", "")), str(entry.get("password", "")))
    try:
        user, _separator, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
    except (binascii.Error, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: auths[{key!r}].auth is not base64 of name:password") from error
    return Credentials(user, password.rstrip("\0"))


async def _ask(helper: str, key: str) -> Credentials | None:
    """Ask a credential helper, a program named docker-credential-NAME."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", helper):
        raise ConfigError(f"credential helper {helper!r}: not the name of one")
    try:
        with anyio.fail_after(HELPER_TIMEOUT):
            done = await anyio.run_process(
                [f"docker-credential-{helper}", "get"], input=key.encode(), stderr=subprocess.DEVNULL, check=False
            )
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, TimeoutError, ValueError) as error:
        raise ConfigError(f"credential helper docker-credential-{helper} failed: {error}") from error
    return Credentials(str(found["Username"]), str(found["Secret"])) if isinstance(found, dict) else None
