"""Images on demand: a name goes in, a held and unpacked image comes out, with one pull however many ask.

A pull belongs to the `Puller`, not to whoever asked first: it goes on when they go away. A registry is asked once for a
name, until its image is collected; what lies in files is looked at again by each process. A full disk refuses new
images and, through `check_space`, new sandboxes, and never touches what runs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
from anyio.abc import TaskGroup

from skyenv.errors import ConfigError, SandboxError, SandboxUnavailable, SkyEnvError, boundary
from skyenv.remote.images import manifests, references, registry
from skyenv.remote.images.engine import EngineSource
from skyenv.remote.images.files import ArchiveSource, DirectorySource, LayoutSource
from skyenv.remote.images.manifests import ImageConfig, Manifest
from skyenv.remote.images.references import Reference
from skyenv.remote.images.settings import ImageSettings
from skyenv.remote.images.sources import Source
from skyenv.remote.images.store import Image, Store, layer_id, remove_tree
from skyenv.remote.images.unpacking import Unpacker
from skyenv.remote.tasks import background_tasks

LOG = logging.getLogger(__name__)
MAX_ALIASES = 4096


@dataclass
class Pull:
    """One that is under way: how far it is, in bytes, and how it ended."""

    done: anyio.Event = field(default_factory=anyio.Event)
    arrived: int = 0
    total: int = 0
    complete: bool = False
    error: SkyEnvError | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """A pull's parts, once they are known. `held` are the layers that it keeps in the store meanwhile."""

    what: str
    source: Source
    manifest: Manifest
    config: ImageConfig
    pull: Pull
    held: list[str]


class Puller:
    """See the module. `base_uid` shifts owners (None: everything belongs to `run_as`, or to us)."""

    def __init__(self, settings: ImageSettings, *, base_uid: int | None = None, run_as: int | None = None) -> None:
        self._settings = settings
        root = settings.root / ("shifted" if base_uid is not None else f"user-{run_as}" if run_as else "plain")
        self.store = Store(root, run_as)
        self._unpacker = Unpacker(
            workers=settings.workers, base_uid=base_uid, run_as=run_as, max_bytes=settings.max_layer_bytes
        )
        self._downloads = anyio.CapacityLimiter(settings.downloads)
        self._pulls: dict[str, Pull] = {}
        self._fresh: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._layers: dict[str, anyio.Lock] = {}
        self._taking = anyio.Lock()
        self._stamp = (0, 0)
        self._complete: frozenset[str] = frozenset()
        self._http: httpx.AsyncClient | None = None
        self._group: TaskGroup | None = None
        self.pulls = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Use the store in the block; pulls that are under way when it ends are dropped."""
        await anyio.to_thread.run_sync(self.store.open)
        try:
            async with registry.client(self._settings) as self._http, background_tasks() as self._group:
                yield
        finally:
            self.store.close()

    def ready(self) -> list[str]:
        """What starts without a pull, as people wrote it and in full."""
        stamp = self.store.stamp()
        if stamp != self._stamp:
            self._stamp, self._complete = stamp, frozenset(image.reference for image in self.store.images())
        complete = self._complete
        return sorted(complete | {text for text, full in self._aliases.items() if full in complete})

    def under_way(self) -> dict[str, dict[str, int]]:
        """What is being pulled, and how many bytes of how many have arrived."""
        return {name: {"bytes": pull.arrived, "total": pull.total} for name, pull in self._pulls.items()}

    def parse(self, text: str) -> Reference:
        """A reference that may be used here. ConfigError for one that may not."""
        reference = references.parse(text)
        if reference.transport in ("oci", "docker-archive", "dir"):
            self._check_path(text, Path(reference.path))
        return reference

    def _check_path(self, text: str, path: Path) -> None:
        resolved = path.resolve()
        if not any(resolved.is_relative_to(allowed.resolve()) for allowed in self._settings.paths):
            allowed = ", ".join(map(str, self._settings.paths)) or "none"
            raise ConfigError(
                f"image {text!r}: files of this machine may be named below these directories only: {allowed} "
                "(SKYENV_LOCAL_IMAGES)"
            )

    def _is_current(self, reference: Reference) -> bool:
        return reference.transport == "registry" or str(reference) in self._fresh

    async def take(self, text: str) -> Image:
        """An image that stays until the store's `release`, pulled if need be.

        ConfigError when there is none, SandboxUnavailable (registry, disk_full) when it cannot be had now.
        """
        reference = await anyio.to_thread.run_sync(self.parse, text)
        for _attempt in range(3):
            if self._is_current(reference):
                async with self._taking:
                    image = await anyio.to_thread.run_sync(self.store.take, reference)
                if image is not None:
                    self._remember(text, reference)
                    return image
            await self._join(reference)
        raise SandboxUnavailable(f"image {text} is removed as often as it is pulled", 5.0, reason="disk_full")

    def _remember(self, text: str, reference: Reference) -> None:
        if len(self._aliases) < MAX_ALIASES:
            self._aliases[text] = str(reference)

    async def _join(self, reference: Reference) -> None:
        """Wait for a pull, which is started unless there is one."""
        if self._group is None:
            raise SandboxUnavailable("the node is closing", reason="closing")
        pull = self._pulls.get(str(reference))
        if pull is None:
            pull = self._pulls[str(reference)] = Pull()
            self._group.start_soon(self._run, reference, pull)
        await pull.done.wait()
        if pull.error is not None:
            raise pull.error
        if not pull.complete:
            raise SandboxUnavailable(f"the pull of image {reference} was dropped", 1.0, reason="closing")

    async def _run(self, reference: Reference, pull: Pull) -> None:
        """One pull, whose end everybody who waits hears."""
        self.pulls += 1
        scratch = self.store.scratch()
        try:
            with boundary(SandboxError, f"image {reference}"), anyio.fail_after(self._settings.pull_timeout):
                await self._pull(reference, pull, scratch)
            self._fresh.add(str(reference))
            pull.complete = True
        except SkyEnvError as error:
            late = isinstance(error.__cause__, TimeoutError)
            text = f"image {reference} did not arrive in {self._settings.pull_timeout} s ({pull.arrived} bytes did)"
            pull.error = SandboxUnavailable(text, 10.0, reason="registry") if late else error
            LOG.warning("pull failed: %s", pull.error)
        finally:
            del self._pulls[str(reference)]
            scratch.unlink(missing_ok=True)
            pull.done.set()

    async def _pull(self, reference: Reference, pull: Pull, scratch: Path) -> None:
        await self.check_space()
        source = self._source(reference, scratch)
        manifest = await source.manifest()
        config = manifests.parse_config(await source.config(), str(reference))
        if len(config.diff_ids) != len(manifest.layers):
            raise ConfigError(f"image {reference}: its configuration and its manifest name different layers")
        pull.total = sum(layer.size for layer in manifest.layers)
        job = _Job(str(reference), source, manifest, config, pull, [])
        try:
            async with anyio.create_task_group() as group:
                for index in range(len(manifest.layers)):
                    group.start_soon(self._layer, job, index)
            image = Image(job.what, manifest.digest, tuple(map(layer_id, config.diff_ids)), config)
            await anyio.to_thread.run_sync(self.store.keep_image, image)
        finally:
            for diff_id in job.held:
                self.store.release_layer(diff_id)

    async def _layer(self, job: _Job, index: int) -> None:
        """Have one layer in the store and held, once however many images need it."""
        diff_id = job.config.diff_ids[index]
        async with self._layers.setdefault(diff_id, anyio.Lock()):
            if self.store.hold_layer(diff_id):
                job.pull.arrived += job.manifest.layers[index].size
            else:
                await self._make_layer(job, index)
            job.held.append(diff_id)

    async def _make_layer(self, job: _Job, index: int) -> None:
        def progress(size: int) -> None:
            job.pull.arrived += size

        scratch, made = self.store.scratch(), self.store.scratch_directory()
        try:
            async with self._downloads:
                blob = await job.source.layer(index, scratch, progress)
            info = await self._unpacker.unpack(blob, made, job.config.diff_ids[index], job.what)
            await anyio.to_thread.run_sync(self.store.keep_layer, made, info)
        finally:
            with anyio.CancelScope(shield=True):
                scratch.unlink(missing_ok=True)
                await anyio.to_thread.run_sync(remove_tree, made)

    def _source(self, reference: Reference, scratch: Path) -> Source:
        match reference.transport:
            case "oci":
                return LayoutSource(reference)
            case "docker-archive":
                return ArchiveSource(str(reference), Path(reference.path), reference.tag)
            case "dir":
                return DirectorySource(reference, self._unpacker, scratch)
            case "docker-daemon" | "podman":
                return EngineSource(reference, scratch)
        if self._http is None:
            raise SandboxUnavailable("the node is closing", reason="closing")
        return registry.RegistrySource(self._http, reference, self._settings)

    async def check_space(self) -> None:
        """Make room when the disk gets full. SandboxUnavailable (disk_full) when there is none."""
        usage = await anyio.to_thread.run_sync(self.store.usage)
        if usage > self._settings.collect_at:
            gone = await anyio.to_thread.run_sync(self.store.collect, self._settings.collect_at)
            LOG.info("the image store is %.0f %% full; %d images were removed", usage * 100, len(gone))
            usage = await anyio.to_thread.run_sync(self.store.usage)
        if usage > self._settings.full_at:
            raise SandboxUnavailable(
                f"the disk of {self.store.root} is {usage:.0%} full and nothing there is unused",
                5.0,
                reason="disk_full",
            )
