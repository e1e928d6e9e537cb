"""Wheels for a task's environment, downloaded on the host and installed inside sandboxes without a network.

One directory of the cache holds what one requirement list resolves to for one Python version. It is filled under a
private name, listed with digests, and renamed into place; a directory that does not match its list is filled again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from skyenv.errors import ConfigError, SourceUnavailable

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
DOWNLOAD_SECONDS = 600.0
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?==[A-Za-z0-9.!+_-]+")
_LIST = "wheels.json"
_log = logging.getLogger(__name__)


async def fetch_wheels(requirements: Sequence[str], *, cache: Path, python: str = THIS_PYTHON) -> list[Path]:
    """Return the wheels of `requirements` and of what they depend on, for Python `python` ("3.11") on this platform.

    Every requirement is pinned (`name==version`); pip resolves the rest once, and the cache keeps its answer.
    ConfigError for an unpinned or unknown requirement, `SourceUnavailable` when the index cannot be reached.
    """
    for requirement in requirements:
        if not _PINNED.fullmatch(requirement):
            raise ConfigError(f"environment.packages: {requirement!r} is not pinned; write name==version")
    if not re.fullmatch(r"3\.\d+", python):
        raise ConfigError(f"python: {python!r} is not a version such as '3.11'")
    if not requirements:
        return []
    key = hashlib.sha256(json.dumps([python, sys.platform, sorted(requirements)]).encode()).hexdigest()
    place = cache / "wheels" / key
    if found := await to_thread.run_sync(_listed, place):
        return found
    await _fill(sorted(requirements), place, python)
    if found := await to_thread.run_sync(_listed, place):
        return found
    raise SourceUnavailable(f"{place} was changed while it was filled; try again")


async def _fill(requirements: list[str], place: Path, python: str) -> None:
    await to_thread.run_sync(partial(place.parent.mkdir, parents=True, exist_ok=True))
    scratch = Path(await to_thread.run_sync(partial(tempfile.mkdtemp, prefix=".pip-", dir=place.parent)))
    try:
        await _download(requirements, scratch, python)
        await to_thread.run_sync(_publish, scratch, place)
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(partial(shutil.rmtree, scratch, ignore_errors=True))


async def _download(requirements: list[str], scratch: Path, python: str) -> None:
    _log.info("downloading wheels of %s", ", ".join(requirements))
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--progress-bar", "off", "--only-binary", ":all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(scratch), *requirements]
    try:
        with anyio.fail_after(DOWNLOAD_SECONDS):
            done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
    except TimeoutError as error:
        raise SourceUnavailable(f"pip took more than {DOWNLOAD_SECONDS:g} s for {requirements}") from error
    output = done.stdout.decode(errors="replace").strip()
    if "No module named pip" in output:
        raise ConfigError(f"environment.packages needs pip: {sys.executable} -m ensurepip")
    if "No matching distribution" in output and "connection" not in output.lower():
        raise ConfigError(f"environment.packages: no wheels of {requirements} for Python {python}: {output[-500:]}")
    if done.returncode:
        raise SourceUnavailable(f"cannot download wheels of {requirements}: {output[-500:]}")


def _publish(scratch: Path, place: Path) -> None:
    digests = {wheel.name: _digest(wheel) for wheel in scratch.glob("*.whl")}
    (scratch / _LIST).write_text(json.dumps(digests, indent=1, sort_keys=True))
    scratch.chmod(0o755)
    if place.exists() and not _listed(place):
        shutil.rmtree(place, ignore_errors=True)
    try:
        scratch.rename(place)
    except OSError:
        _log.debug("%s was filled by another process", place)


def _listed(place: Path) -> list[Path]:
    """Return the wheels of a complete directory; empty when it is absent or does not match its list."""
    try:
        digests = json.loads((place / _LIST).read_text())
        if all(_digest(place / name) == digest for name, digest in digests.items()):
            return sorted(place / name for name in digests)
        _log.warning("%s is corrupt; downloading it again", place)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("%s is corrupt (%s); downloading it again", place, error)
    return []


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
