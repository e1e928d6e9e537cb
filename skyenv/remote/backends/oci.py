"""Sandboxes from container images by an OCI runtime, without an engine: crun or runc over an overlay of our own.

The overlay's lower directories are the image's unpacked layers above a small base (empty mount points, names of the
usual users), then the layers of a snapshot. The runtime makes a container whose only process sleeps, the launcher's
init joins it (`inside.contain`), and commands cost what they cost in every backend. An image's Env and WorkingDir
apply; its Entrypoint, Cmd and User do not: nothing of an image runs unasked, and a session is the container's root.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from skyenv.errors import ConfigError, SandboxError, SkyEnvError
from skyenv.remote.backends import Record, launching, runtimes, skeleton
from skyenv.remote.backends.local import DEFAULT_ENV, LocalBackend
from skyenv.remote.backends.probe import BASE_UID, Probe, probe, shared_config
from skyenv.remote.backends.runtimes import Runtime
from skyenv.remote.channel import Channel
from skyenv.remote.images.puller import Puller
from skyenv.remote.images.settings import ImageSettings
from skyenv.remote.images.store import Image, restore
from skyenv.remote.inside import cgroups
from skyenv.remote.protocol import CreateRequest, Spec
from skyenv.remote.tasks import background_tasks

LOG = logging.getLogger(__name__)
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_DIRECTORIES = ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "var/tmp")
TRIAL_TIMEOUT = 20.0


class OciBackend(LocalBackend):
    """See the module. `image` is what a sandbox gets whose request names none; `runtime` a name or a path.

    `run_as` makes launcher and unpackers give up root for this user id first (rootless mode).
    """

    name = "oci"

    def __init__(
        self,
        image: str | None = None,
        runtime: str | None = None,
        settings: ImageSettings | None = None,
        *,
        run_as: int | None = None,
        home: launching.Home | None = None,
    ) -> None:
        super().__init__(run_as, home)
        self._default = image
        self._wanted = runtime
        self._settings = settings or ImageSettings()
        self._runtime: Runtime | None = None
        self._rejected: list[str] = []
        self._untried = False
        self._sleeper = ""
        self._groups = "/"
        self._puller: Puller | None = None
        self._used: dict[str, Image] = {}
        self._works: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Find a runtime that works here. ConfigError with reasons when there is none."""
        self._sleeper = runtimes.find_sleeper(self.name)
        async with AsyncExitStack() as stack:
            launcher = await stack.enter_async_context(self._choose_runtime())
            base_uid = BASE_UID if self._opened().mode == "root" else None
            self._puller = Puller(self._settings, base_uid=base_uid, run_as=self._run_as)
            await stack.enter_async_context(self._puller.open())
            self._used = {name: restore(saved) for name, saved in launcher.kept.items()}
            for image in self._used.values():
                await anyio.to_thread.run_sync(self._puller.store.hold, image)
            await self._find_snapshots()
            yield

    @asynccontextmanager
    async def _choose_runtime(self) -> AsyncIterator[launching.Launcher]:
        """A launcher for the first runtime with which a container can be made, joined and ended here."""
        usable, self._rejected = await anyio.to_thread.run_sync(runtimes.candidates, self._wanted)
        for self._runtime in usable:
            self._untried = False
            async with launching.launch(self.name, self._prepare, self._home) as launcher:
                self._recall(launcher)
                try:
                    if self._untried:
                        await self._try_once()
                except SkyEnvError as error:
                    self._rejected.append(f"{self._chosen.path}: {error}")
                    continue
                yield launcher
                return
        raise ConfigError("no OCI runtime works here; install crun or runc:\n  " + "\n  ".join(self._rejected))

    def _recall(self, launcher: launching.Launcher) -> None:
        """A launcher of a former node goes on with its runtime."""
        config = launcher.config
        self._launcher, self._state = launcher, Path(config["state"])
        self._probe, self._runtime = Probe.restore(config["probe"]), Runtime(**config["oci"]["runtime"])
        self._groups = config["oci"]["groups"]

    async def _prepare(self) -> dict[str, Any]:
        """A state directory and a launcher's configuration for the runtime to try."""
        self._untried = True
        found = await anyio.to_thread.run_sync(probe, self._run_as, self._home.path if self._home else None)
        if found.mode is None:
            raise ConfigError("this machine cannot isolate sandboxes:\n  " + "\n  ".join(found.reasons))
        if not found.overlay:
            raise ConfigError("images need an overlay file system:\n  " + "\n  ".join(found.reasons))
        owner = BASE_UID if found.mode == "root" else self._run_as
        state = await anyio.to_thread.run_sync(launching.make_state, found.base, self._run_as)
        await anyio.to_thread.run_sync(_build_base, state, owner)
        groups, hierarchies = "/", [cgroups.Hierarchy(*entry) for entry in found.cgroups]
        if self._chosen.makes_groups and found.mode == "root":
            groups, hierarchies = cgroups.everywhere(hierarchies)
        return {
            **shared_config(state, found.mode, found.overlay, [], self._run_as),
            "cgroups": [list(entry) for entry in hierarchies],
            "probe": found.save(),
            "oci": {"runtime": asdict(self._chosen), "groups": groups},
        }

    @property
    def _chosen(self) -> Runtime:
        if self._runtime is None:
            raise ConfigError("the backend is not open")
        return self._runtime

    @property
    def _images(self) -> Puller:
        if self._puller is None:
            raise ConfigError("the backend is not open")
        return self._puller

    async def _try_once(self) -> None:
        """Make a container from nothing and have its init answer."""
        name = uuid.uuid4().hex
        own = self._own(name, [], Spec(), "/")
        sock = await self._fork(name, CreateRequest(), {}, own)
        channel = Channel(sock, "the trial ended")
        try:
            async with background_tasks() as group:
                group.start_soon(channel.serve)
                await channel.request({"op": "stat", "path": "/"}, timeout=TRIAL_TIMEOUT)
        except SandboxError as error:
            raise SandboxError(channel.last_words or str(error)) from error
        finally:
            with anyio.CancelScope(shield=True):
                channel.close("the trial ended")
                await self._running.ask({"op": "destroy", "name": name})

    def describe(self) -> dict[str, Any]:
        """As `local`, with the runtime, the image store and what is being pulled."""
        described = super().describe()
        return described | {
            "runtime": {"path": self._chosen.path, "version": self._chosen.version},
            "images": {"store": str(self._images.store.root), "pulling": self._images.under_way()},
            "notes": [*described["notes"], *self._rejected],
        }

    def environment(self, sandbox: str) -> dict[str, str]:
        """The usual defaults and what the image sets."""
        image = self._used.get(sandbox)
        return {**DEFAULT_ENV, "PATH": SEARCH_PATH, **(image.config.env if image is not None else {})}

    def images(self) -> list[str]:
        """See `Backend.images`."""
        return self._images.ready()

    async def pull(self, image: str) -> None:
        """See `Backend.pull`."""
        self._images.store.release(await self._images.take(image))

    async def create(self, sandbox: str, request: CreateRequest, record: Record) -> socket.socket:
        """Start a container and join it. ConfigError for an image or a snapshot that cannot be had."""
        await self._images.check_space()
        image = await self._image_of(request)
        self._used[sandbox] = image
        own = self._own(sandbox, self._stack(image), request.spec, image.config.workdir or "/root")
        own["keep"] = {sandbox: asdict(image)}
        works = (image.digest, request.spec.shell)
        if works in self._works:
            own["shell_check"] = "known"
        sock = await self._fork(sandbox, request, record, own)
        self._works.add(works)
        return sock

    async def _image_of(self, request: CreateRequest) -> Image:
        """The image that a request is for, held."""
        if request.snapshot is not None:
            if request.snapshot not in self._shells:
                raise ConfigError(f"snapshot {request.snapshot!r} does not exist on this node")
            image = self._used[request.snapshot]
            self._images.store.hold(image)
            return image
        name = request.image or self._default
        if name is None:
            raise ConfigError("image: backend 'oci' needs one, in the request or as the node's default")
        return await self._images.take(name)

    def _stack(self, image: Image) -> list[str]:
        return [str(self._images.store.layers / name) for name in reversed(image.layers)]

    def _own(self, sandbox: str, layers: list[str], spec: Spec, home: str) -> dict[str, Any]:
        root = self._opened().mode == "root"
        groups = f"{self._groups.rstrip('/')}/{sandbox}" if root and self._chosen.makes_groups else None
        container = runtimes.bundle(
            base_uid=BASE_UID if root else None,
            sleeper=self._sleeper,
            tmpfs_bytes=spec.tmpfs_bytes,
            groups=groups,
            network=spec.network,
        )
        return {
            "container": container,
            "runtime": self._chosen.command(),
            "lower": [*layers, str(self._state / "skeleton")],
            "sysfs": str(self._state / "sysfs"),
            "home": home,
            "shell_check": "optional",
        }

    def _lower(self, sandbox: str) -> list[str]:
        return [*self._stack(self._used[sandbox]), str(self._state / "skeleton")]

    async def destroy(self, sandbox: str) -> None:
        """Kill it, container included, and let go of its image."""
        await super().destroy(sandbox)
        await self._let_go(sandbox)

    async def _let_go(self, holder: str) -> None:
        image = self._used.pop(holder, None)
        if image is not None:
            await self._running.keep({holder: None})
            self._images.store.release(image)

    async def snapshot(self, sandbox: str, shell: bytes, *, idle: bool = False) -> str:
        """As `local`; the image stays as long as the snapshot."""
        image = self._used[sandbox]
        self._images.store.hold(image)
        try:
            name = await super().snapshot(sandbox, shell, idle=idle)
        except SkyEnvError:
            self._images.store.release(image)
            raise
        self._used[name] = image
        await self._running.keep({name: asdict(image)})
        return name

    async def delete_snapshot(self, snapshot: str) -> None:
        """Forget it; its layers and image go once no sandbox needs them."""
        await super().delete_snapshot(snapshot)
        await self._let_go(snapshot)


def _build_base(state: Path, owner: int | None) -> None:
    """What every image stands on, and what a sandbox sees as /sys."""
    base, sysfs = state / "skeleton", state / "sysfs"
    (sysfs / "devices/system/cpu").mkdir(parents=True)
    for name in BASE_DIRECTORIES:
        (base / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (base / name).chmod(0o1777)
    for name in ("hosts", "hostname", "passwd", "group", "resolv.conf"):
        (base / "etc" / name).write_text(skeleton.GENERATED[name])
    if owner is not None:
        for top in (base, sysfs):
            for folder, _names, files in os.walk(top):
                for name in ("", *files):
                    os.chown(Path(folder, name), owner, owner)
