"""Source distributions from a package index, through a cache that is keyed and verified by sha256.

The index is the one of `PIP_INDEX_URL`, else the default of `pypi-simple`. Files arrive under a private name and are
renamed into place, so any number of processes may share a cache; what no longer matches its digest is fetched again.
A source distribution is only ever unpacked: nothing of it runs on the host.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from skyenv.errors import ConfigError, SourceUnavailable

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage, PyPISimple

FETCH_SECONDS = 60.0
_log = logging.getLogger(__name__)


def default_cache() -> Path:
    """`$SKYENV_CACHE`, else `skyenv` in the user's cache directory."""
    if chosen := os.environ.get("SKYENV_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyenv"


def fetch_sdist(name: str, version: str, sha256: str, cache: Path) -> bytes:
    """Return the bytes of a source distribution whose digest is `sha256`; blocks, at most a few minutes.

    ConfigError when the index has no such file or `pypi-simple` is missing; `SourceUnavailable` when it is not cached
    and the index cannot be reached.
    """
    place = cache / "sdists" / sha256
    if (data := _cached(place, sha256)) is not None:
        return data
    try:
        import pypi_simple
        import requests
    except ImportError as error:
        raise ConfigError(f"{name} {version} comes from a package index: pip install 'skyenv[pypi]'") from error
    _log.info("fetching %s %s", name, version)
    try:
        with pypi_simple.PyPISimple(_endpoint()) as index:
            data = _download(index, _find(index, name, version, sha256), place, sha256)
    except pypi_simple.NoSuchProjectError as error:
        raise ConfigError(f"the package index knows no project {name!r}; correct `name`") from error
    except (requests.RequestException, pypi_simple.UnsupportedContentTypeError) as error:
        raise SourceUnavailable(
            f"{name} {version} is not in the cache {cache} and the package index cannot be reached "
            f"({type(error).__name__}); go online once or set PIP_INDEX_URL"
        ) from error
    _log.info("fetched %s %s, %d bytes", name, version, len(data))
    return data


def sdist_digest(name: str, version: str) -> str:
    """Ask the index for the sha256 of the source distribution of a version. Raises as `fetch_sdist`."""
    try:
        import pypi_simple
        import requests
    except ImportError as error:
        raise ConfigError(f"{name} {version} comes from a package index: pip install 'skyenv[pypi]'") from error
    try:
        with pypi_simple.PyPISimple(_endpoint()) as index:
            digest = _find(index, name, version, None).digests.get("sha256")
    except pypi_simple.NoSuchProjectError as error:
        raise ConfigError(f"the package index knows no project {name!r}; correct `name`") from error
    except (requests.RequestException, pypi_simple.UnsupportedContentTypeError) as error:
        raise SourceUnavailable(f"the package index cannot be reached ({type(error).__name__}); go online") from error
    if digest is None:
        raise ConfigError(f"the package index tells no sha256 of {name} {version}")
    return digest


def _endpoint() -> str:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT


def _cached(place: Path, sha256: str) -> bytes | None:
    if not place.is_file():
        return None
    data = place.read_bytes()
    if hashlib.sha256(data).hexdigest() == sha256:
        return data
    _log.warning("%s is corrupt; fetching it again", place)
    return None


def _find(index: PyPISimple, name: str, version: str, sha256: str | None) -> DistributionPackage:
    sdists = [
        package
        for package in index.get_project_page(name, timeout=FETCH_SECONDS).packages
        if package.package_type == "sdist" and package.version == version
    ]
    for package in sdists:
        if sha256 is None or package.digests.get("sha256", sha256) == sha256:
            return package
    reason = "with this sha256" if sdists else "of this version"
    raise ConfigError(f"the package index has no source distribution of {name} {version} {reason}")


def _download(index: PyPISimple, package: DistributionPackage, place: Path, sha256: str) -> bytes:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=place.parent) as scratch:
        part = Path(scratch) / "sdist"
        index.download_package(package, part, verify=False, timeout=FETCH_SECONDS)
        data = part.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ConfigError(f"{package.filename}: the index sent a file with another sha256 than {sha256}")
        part.replace(place)
    return data
