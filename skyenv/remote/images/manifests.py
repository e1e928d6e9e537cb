"""Manifests and image configurations: what is trusted of them and what is refused.

Everything here comes from outside. A manifest names blobs by digest and size; a configuration says what a process of
the image starts with. The entrypoint is read, so that people can be told of it, and never run.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyenv.errors import ConfigError

INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
MAX_MANIFEST = 4 << 20
MAX_CONFIG = 8 << 20
MAX_LAYERS = 127
MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "ppc64le": "ppc64le", "s390x": "s390x"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def architecture() -> str:
    """The architecture of this machine, as images name it."""
    machine = platform.machine()
    return MACHINES.get(machine, machine)


def digest_of(data: bytes) -> str:
    """A blob's name."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob: its digest and its size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image of one architecture: the blob of its configuration and those of its layers, lowest first."""

    digest: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says of its processes, and the digests of its unpacked layers, lowest first."""

    architecture: str
    diff_ids: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]


def load(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object from outside. ConfigError when it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"image {what}: its manifest or configuration is not JSON") from error
    if not isinstance(found, dict):
        raise ConfigError(f"image {what}: its manifest or configuration is not a JSON object")
    return found


def descriptor(value: object, what: str) -> Descriptor:
    """A reference to a blob. ConfigError when it is malformed."""
    fields = _object(value)
    digest, size = fields.get("digest"), fields.get("size")
    if not (isinstance(digest, str) and _DIGEST.fullmatch(digest) and isinstance(size, int) and size >= 0):
        raise ConfigError(f"image {what}: a blob without a sha256 digest and a size is named in its manifest")
    return Descriptor(digest, size)


def is_index(found: Mapping[str, Any], media_type: str) -> bool:
    """Whether it lists manifests of several architectures."""
    return found.get("mediaType", media_type) in INDEXES or ("manifests" in found and "layers" not in found)


def choose(found: Mapping[str, Any], what: str) -> Descriptor:
    """The manifest for this machine in an index. ConfigError naming the architectures that there are."""
    wanted, offered = architecture(), []
    entries = found.get("manifests")
    for entry in entries if isinstance(entries, list) else ():
        fields = _object(entry)
        where = _object(fields.get("platform"))
        system, machine = where.get("os", "linux"), where.get("architecture", wanted)
        if system == "linux" and machine == wanted:
            return descriptor(fields, what)
        offered.append(f"{system}/{machine}")
    there_are = ", ".join(sorted(set(offered) - {"unknown/unknown"})) or "none at all"
    raise ConfigError(f"image {what}: there is none for linux/{wanted}; there are: {there_are}")


def parse_manifest(data: bytes, what: str) -> Manifest:
    """Check the manifest of one image. ConfigError for what is malformed or too old."""
    found = load(data, what)
    if found.get("schemaVersion") != 2 or not isinstance(found.get("layers"), list):
        raise ConfigError(f"image {what}: only manifests of schema 2 are understood; push it again with a newer tool")
    layers = tuple(descriptor(entry, what) for entry in found["layers"])
    if len(layers) > MAX_LAYERS:
        raise ConfigError(f"image {what}: {len(layers)} layers are too many; at most {MAX_LAYERS} are possible")
    return Manifest(digest_of(data), descriptor(found.get("config"), what), layers)


def parse_config(data: bytes, what: str) -> ImageConfig:
    """Check an image's configuration. ConfigError for another architecture."""
    found = load(data, what)
    machine, system = found.get("architecture", architecture()), found.get("os", "linux")
    if (system, machine) != ("linux", architecture()):
        raise ConfigError(f"image {what}: it is for {system}/{machine}, this machine is linux/{architecture()}")
    fields, rootfs = _object(found.get("config")), _object(found.get("rootfs"))
    pairs = (each.partition("=") for each in _texts(fields.get("Env")) if "\0" not in each)
    return ImageConfig(
        architecture=machine,
        diff_ids=tuple(each for each in _texts(rootfs.get("diff_ids")) if _DIGEST.fullmatch(each)),
        env={name: value for name, equals, value in pairs if equals},
        workdir=str(fields.get("WorkingDir") or ""),
        user=str(fields.get("User") or ""),
        entrypoint=_texts(fields.get("Entrypoint")),
        command=_texts(fields.get("Cmd")),
    )


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: object) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
