"""What can be chosen about images. `default_root` says where they lie when nobody chose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from skyenv.errors import ConfigError, did_you_mean


def default_root() -> Path:
    """SKYENV_IMAGES_DIR, or the usual place of the current user."""
    chosen = os.environ.get("SKYENV_IMAGES_DIR")
    if chosen:
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/var/lib/skyenv/images")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyenv" / "images"


def default_paths() -> tuple[Path, ...]:
    """SKYENV_LOCAL_IMAGES: directories, separated by colons."""
    return tuple(Path(each) for each in os.environ.get("SKYENV_LOCAL_IMAGES", "").split(":") if each)


def default_workers() -> int:
    """Unpacking is bound by the processor: half of them."""
    return max(1, (os.cpu_count() or 2) // 2)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Times in seconds, sizes in bytes, disk use as a fraction of the file system.

    `mirrors` maps a registry's host to URLs that are asked before it. `insecure` names hosts that are spoken to
    without TLS; loopback ones always are. `docker_config` holds the credentials (config.json as docker writes it).
    Images that lie in files may be named by clients only if they lie below one of `paths`: a client could read any
    directory of this machine otherwise. Unused images go once `collect_at` of the disk is in use; at `full_at` no new
    sandbox is started.
    """

    root: Path = field(default_factory=default_root)
    paths: tuple[Path, ...] = field(default_factory=default_paths)
    mirrors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    insecure: tuple[str, ...] = ()
    docker_config: Path | None = None
    pull_timeout: float = 3600.0
    stall_timeout: float = 30.0
    attempts: int = 6
    longest_wait: float = 30.0
    downloads: int = 3
    workers: int = field(default_factory=default_workers)
    max_layer_bytes: int = 64 << 30
    collect_at: float = 0.85
    full_at: float = 0.95


def _several(value: Any) -> tuple[str, ...]:
    """One text, or a list of them."""
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def read_settings(values: Mapping[str, Any]) -> ImageSettings:
    """Settings from a configuration file or a command line. ConfigError naming a key that does not exist."""
    known = [each.name for each in fields(ImageSettings)]
    for key in values:
        if key not in known:
            raise ConfigError(f"images have no option {key!r}{did_you_mean(key, known)}")
    found = dict(values)
    for key in ("root", "docker_config"):
        if found.get(key) is not None:
            found[key] = Path(found[key])
    if "paths" in found:
        found["paths"] = tuple(map(Path, _several(found["paths"])))
    if "insecure" in found:
        found["insecure"] = _several(found["insecure"])
    if "mirrors" in found:
        if not isinstance(found["mirrors"], dict):
            raise ConfigError("mirrors: a mapping of registries to URLs is wanted, as {docker.io: http://mirror:5000}")
        found["mirrors"] = {str(host): _several(urls) for host, urls in found["mirrors"].items()}
    return ImageSettings(**found)
