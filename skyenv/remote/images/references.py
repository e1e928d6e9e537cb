"""What people write to name an image, taken apart.

`python:3.11`, `host:5000/team/name:tag`, `name@sha256:...`, `docker://name` name an image in a registry;
`oci:/path[:tag]` one in an OCI layout directory, `docker-archive:/file.tar[:name]` one in a file made by `docker save`,
`docker-daemon:name` and `podman:name` one in an engine on this machine, `dir:/path` is a root file system.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skyenv.errors import ConfigError

Transport = Literal["registry", "oci", "docker-archive", "docker-daemon", "podman", "dir"]
DOCKER_HUB = "docker.io"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Reference:
    """An image's name. `str` is its canonical form: two ways to write the same name compare equal.

    In a registry `host`, `repository` and `tag` or `digest` say where; elsewhere `path` and `tag` do.
    """

    transport: Transport
    host: str = ""
    repository: str = ""
    tag: str | None = None
    digest: str | None = None
    path: str = ""

    def __str__(self) -> str:
        if self.transport == "registry":
            text = f"{self.host}/{self.repository}"
            text += f":{self.tag}" if self.tag else ""
            return text + (f"@{self.digest}" if self.digest else "")
        return f"{self.transport}:{self.path}" + (f":{self.tag}" if self.tag else "")


def parse(text: str) -> Reference:
    """Take a reference apart. ConfigError saying what is wrong with it."""
    scheme, separator, rest = text.partition(":")
    if separator and scheme in ("oci", "docker-archive", "dir"):
        return _in_a_path(text, scheme, rest)  # type: ignore[arg-type]
    if separator and scheme in ("docker-daemon", "podman"):
        named = _in_a_registry(rest)
        name = f"{named.repository}" if named.host == DOCKER_HUB else f"{named.host}/{named.repository}"
        name = name.removeprefix("library/")
        return Reference(scheme, path=name + (f"@{named.digest}" if named.digest else f":{named.tag}"))  # type: ignore[arg-type]
    return _in_a_registry(text.removeprefix("docker://"))


def _in_a_path(text: str, transport: Transport, rest: str) -> Reference:
    path, tag = rest, None
    if transport == "docker-archive":
        path, separator, name = rest.partition(":")
        tag = name if separator else None
    elif transport == "oci":
        head, separator, name = rest.rpartition(":")
        if separator and "/" not in name:
            path, tag = head, name
    if not path.startswith("/"):
        raise ConfigError(f"image {text!r}: the path must be absolute, as in {transport}:/path")
    if tag == "":
        raise ConfigError(f"image {text!r}: the tag after ':' is empty")
    return Reference(transport, path=str(Path(path)), tag=tag)


def _in_a_registry(text: str) -> Reference:
    rest, _separator, digest = text.partition("@")
    if "@" in text and not _DIGEST.fullmatch(digest):
        raise ConfigError(f"image {text!r}: {digest!r} is no digest; write @sha256: and 64 hexadecimal digits")
    first, separator, others = rest.partition("/")
    named = bool(separator) and ("." in first or ":" in first or first == "localhost")
    host, rest = (first, others) if named else (DOCKER_HUB, rest)
    name, separator, tag = rest.partition(":")
    if host in (DOCKER_HUB, "index.docker.io", "registry-1.docker.io"):
        host = DOCKER_HUB
        name = name if "/" in name else f"library/{name}"
    if not _HOST.fullmatch(host) or not all(_PART.fullmatch(part) for part in name.split("/")):
        raise ConfigError(f"image {text!r}: not a name of an image; write [host[:port]/]name[:tag] in lower case")
    if separator and not _TAG.fullmatch(tag):
        raise ConfigError(f"image {text!r}: {tag!r} is no tag")
    return Reference("registry", host, name, tag or (None if digest else "latest"), digest or None)
