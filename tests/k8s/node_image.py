"""The node's image made of what this machine has: its Python, skyenv with what it needs, and a few programs.

People use deploy/image/Dockerfile; this one needs neither a registry nor a builder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from images import COREUTILS, SHELLS, TOOLS, Root, libraries, write_base
from packaging.requirements import Requirement

import skyenv
from skyenv.remote import portable

EXTRAS = {"k8s", "oci"}
PROGRAMS = (
    *SHELLS,
    *COREUTILS,
    *TOOLS,
    "ip",
    "setpriv",
    "umount",
    "newuidmap",
    "newgidmap",
    "crun",
    "runc",
    "catatonit",
)
ENVIRONMENT = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONUNBUFFERED=1")
RUNNER = '#!/bin/sh\nexec python3 -m skyenv.cli "$@"\n'


def needed(name: str, extras: set[str], known: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and all that it requires, by name."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return known
    for line in found.requires or ():
        wanted = Requirement(line)
        asked = any(wanted.marker is None or wanted.marker.evaluate({"extra": extra}) for extra in {"", *extras})
        if asked and wanted.name.lower() not in known:
            known[wanted.name.lower()] = found
            known |= needed(wanted.name, set(wanted.extras), known)
    return {**known, name.lower(): found}


def files_of(each: Distribution) -> Iterator[tuple[Path, str]]:
    """Its files and their places below site-packages."""
    for file in each.files or ():
        path = Path(str(each.locate_file(file)))
        if ".." not in file.parts and path.is_file():
            yield path, str(file)


def add_libraries(root: Root, extension: Path) -> None:
    """What an extension module loads, but for what came with it."""
    for library in libraries(extension.resolve()):
        if "site-packages" not in library.parts:
            root.file(library)


def write_node(out: Path) -> None:
    """A root file system with `skyenv` on the path and the portable directory at /opt/skyenv/portable."""
    site = f"{sys.base_prefix[1:]}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    with Root(out) as root:
        root.text("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
        write_base(root, PROGRAMS)
        for each in needed("skyenv", EXTRAS, {}).values():
            if each.name != "skyenv":
                for path, place in files_of(each):
                    root.file(path, f"{site}/{place}")
                    if ".so" in path.name:
                        add_libraries(root, path)
        package = Path(skyenv.__file__).parent
        for path in sorted(package.rglob("*")):
            if path.is_file() and "data" not in path.parts:
                root.file(path, f"{site}/skyenv/{path.relative_to(package)}")
        root.text("usr/local/bin/skyenv", RUNNER, 0o755)
        for path in sorted(_portable(out).rglob("*")):
            if path.is_file():
                root.file(path, f"opt/skyenv/portable/{path.relative_to(_portable(out))}")


def _portable(out: Path) -> Path:
    place = out.parent / "portable"
    if not place.exists():
        portable.build(place)
    return place
