"""Images that lie on this machine: OCI layouts, archives made by `docker save`, plain directories."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from skyenv.errors import ConfigError
from skyenv.remote.images import manifests, references
from skyenv.remote.images.manifests import Descriptor, Manifest
from skyenv.remote.images.references import Reference
from skyenv.remote.images.sources import Blob, Progress
from skyenv.remote.images.unpacking import Unpacker

CHUNK = 1 << 20
_NAME = "org.opencontainers.image.ref.name"


class LayoutSource:
    """`oci:/path[:tag]`. Without a tag the layout must hold one image."""

    def __init__(self, reference: Reference) -> None:
        self._what = str(reference)
        self._path, self._tag = Path(reference.path), reference.tag
        self._found: Manifest | None = None

    async def manifest(self) -> Manifest:
        """Read the index and the manifest that it names."""
        return await anyio.to_thread.run_sync(self._read)

    def _read(self) -> Manifest:
        index = manifests.load(self._file("index.json", manifests.MAX_MANIFEST), self._what)
        entries = [entry for entry in index.get("manifests") or () if isinstance(entry, dict)]
        if self._tag is not None:
            entries = [entry for entry in entries if (entry.get("annotations") or {}).get(_NAME) == self._tag]
        elif len({(entry.get("annotations") or {}).get(_NAME) for entry in entries}) > 1:
            raise ConfigError(f"image {self._what}: the layout holds several images; add :tag")
        data = self._blob(manifests.choose({"manifests": entries}, self._what), manifests.MAX_MANIFEST)
        while manifests.is_index(found := manifests.load(data, self._what), ""):
            data = self._blob(manifests.choose(found, self._what), manifests.MAX_MANIFEST)
        self._found = manifests.parse_manifest(data, self._what)
        return self._found

    def _place(self, descriptor: Descriptor) -> Path:
        return self._path / "blobs" / "sha256" / descriptor.digest.removeprefix("sha256:")

    def _file(self, name: str, limit: int) -> bytes:
        try:
            with (self._path / name).open("rb") as file:
                return file.read(limit)
        except OSError as error:
            raise ConfigError(f"image {self._what}: not a readable OCI layout: {error}") from error

    def _blob(self, descriptor: Descriptor, limit: int) -> bytes:
        data = self._file(str(self._place(descriptor).relative_to(self._path)), limit)
        if manifests.digest_of(data) != descriptor.digest:
            raise ConfigError(f"image {self._what}: blob {descriptor.digest} is damaged")
        return data

    async def config(self) -> bytes:
        """Read it."""
        found = self._found or await self.manifest()
        return await anyio.to_thread.run_sync(self._blob, found.config, manifests.MAX_CONFIG)

    async def layer(self, index: int, target: Path, progress: Progress) -> Blob:
        """Where it lies; its content is checked while it is unpacked."""
        found = self._found or await self.manifest()
        path = self._place(found.layers[index])
        try:
            size = (await anyio.to_thread.run_sync(path.stat)).st_size
        except OSError as error:
            raise ConfigError(f"image {self._what}: {error}") from error
        progress(size)
        return Blob(path, 0, size, temporary=False)


class ArchiveSource:
    """`docker-archive:/file.tar[:name]`: what `docker save` and `podman save` write. Layers are read in place."""

    def __init__(self, what: str, path: Path, name: str | None) -> None:
        self._what, self._path, self._name = what, path, name
        self._config = b""
        self._places: tuple[tuple[int, int], ...] = ()

    async def manifest(self) -> Manifest:
        """Find everything in the archive."""
        return await anyio.to_thread.run_sync(self._read)

    def _read(self) -> Manifest:
        try:
            with tarfile.open(self._path, "r:") as tar:
                return self._index(tar)
        except (OSError, tarfile.TarError, KeyError, EOFError) as error:
            raise ConfigError(f"image {self._what}: not a readable docker archive: {error}") from error

    def _index(self, tar: tarfile.TarFile) -> Manifest:
        members = {member.name.removeprefix("./"): member for member in tar}
        entry = self._entry(json.loads(_content(tar, members["manifest.json"])))
        self._config = _content(tar, members[str(entry["Config"])])
        places = [_resolve(members, str(name)) for name in entry["Layers"]]
        self._places = tuple((member.offset_data, member.size) for member in places)
        diff_ids = manifests.parse_config(self._config, self._what).diff_ids
        layers = tuple(Descriptor(each, size) for each, (_at, size) in zip(diff_ids, self._places, strict=False))
        digest = manifests.digest_of(self._config)
        return Manifest(digest, Descriptor(digest, len(self._config)), layers)

    def _entry(self, found: object) -> Mapping[str, Any]:
        entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
        if self._name is not None and "@" not in self._name:
            wanted = references.parse(self._name)
            entries = [entry for entry in entries if wanted in map(references.parse, entry.get("RepoTags") or ())]
        if len(entries) != 1:
            raise ConfigError(
                f"image {self._what}: {len(entries)} images of that name are in the archive; one is wanted"
            )
        return entries[0]

    async def config(self) -> bytes:
        """What `manifest` found."""
        return self._config

    async def layer(self, index: int, target: Path, progress: Progress) -> Blob:
        """Where it lies in the archive."""
        offset, size = self._places[index]
        progress(size)
        return Blob(self._path, offset, size, temporary=False)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return b"" if file is None else file.read(manifests.MAX_CONFIG)


def _resolve(members: Mapping[str, tarfile.TarInfo], name: str) -> tarfile.TarInfo:
    """A layer that two images share is a link in old archives."""
    member = members[name]
    if member.issym():
        member = members[member.linkname.replace("../", "")]
    return member


class DirectorySource:
    """`dir:/path`: a root file system, read once into one layer."""

    def __init__(self, reference: Reference, unpacker: Unpacker, scratch: Path) -> None:
        self._what, self._path = str(reference), reference.path
        self._unpacker, self._scratch = unpacker, scratch
        self._layer: Descriptor | None = None

    async def manifest(self) -> Manifest:
        """Pack the directory; its content is its name."""
        if not await anyio.to_thread.run_sync(Path(self._path).is_dir):
            raise ConfigError(f"image {self._what}: there is no such directory")
        await self._unpacker.pack(self._path, self._scratch)
        self._layer = await anyio.to_thread.run_sync(_describe, self._scratch)
        config = await self.config()
        return Manifest(self._layer.digest, Descriptor(manifests.digest_of(config), len(config)), (self._layer,))

    async def config(self) -> bytes:
        """One that says no more than where it runs."""
        diff_ids = [self._layer.digest] if self._layer else []
        config = {"architecture": manifests.architecture(), "os": "linux", "rootfs": {"diff_ids": diff_ids}}
        return json.dumps(config).encode()

    async def layer(self, index: int, target: Path, progress: Progress) -> Blob:
        """What `manifest` packed."""
        size = self._layer.size if self._layer else 0
        progress(size)
        return Blob(self._scratch, 0, size, temporary=False)


def _describe(path: Path) -> Descriptor:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
            size += len(data)
    return Descriptor(f"sha256:{digest.hexdigest()}", size)
