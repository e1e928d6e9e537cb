"""Sandboxes in containers of a docker engine, or of podman through its docker-compatible socket.

The engine creates, commits and deletes. Its container runs `catatonit -P`, which only sleeps; the launcher's init joins
it (`inside.join`), so a command costs what it costs in every backend. Containers publish no ports and have no network.
Every container is labelled with the state directory of its node: what a node that died has left is recognised by its
free lock and removed by the next node. A snapshot is an image of the engine.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from skyenv.errors import ConfigError, SandboxUnavailable, SkyEnvError
from skyenv.remote.backends import Record, engine, launching
from skyenv.remote.backends.local import DEFAULT_ENV, spec_config
from skyenv.remote.backends.probe import state_bases
from skyenv.remote.backends.runtimes import find_sleeper
from skyenv.remote.inside import cgroups
from skyenv.remote.protocol import CreateRequest, Spec
from skyenv.remote.tasks import background_tasks

LOG = logging.getLogger(__name__)
INIT = "/.skyenv-init"
SNAPSHOTS = "skyenv-snapshot"
PREFIX = "skyenv-"
STATE_LABEL, HOST_LABEL, SNAPSHOT_LABEL = "skyenv.state", "skyenv.host", "skyenv.snapshot"
STARTS_AT_A_TIME = 4
TIDY_INTERVAL = 5.0
CLOSE_TIMEOUT = 30.0
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class DockerBackend(launching.LauncherBackend):
    """See the module. `image` is what a sandbox gets whose request names none; `runtime` an OCI runtime by name."""

    name = "docker"

    def __init__(
        self, image: str | None = None, runtime: str | None = None, home: launching.Home | None = None
    ) -> None:
        self._default = image
        self._home = home
        self._runtime = runtime
        self._engine: engine.ContainerEngine | None = None
        self._state = Path()
        self._init = ""
        self._version = ""
        self._hierarchies: list[cgroups.Hierarchy] = []
        self._numbers = itertools.count()
        self._starts = anyio.CapacityLimiter(STARTS_AT_A_TIME)
        self._pulls: dict[str, anyio.Lock] = {}
        self._images: list[str] = []
        self._environments: dict[str, dict[str, str]] = {}
        self._alive: set[str] = set()
        self._shells: dict[str, bytes] = {}
        self._untidy = anyio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Reach the engine and run a launcher. ConfigError when there is no engine or this user may not join."""
        if os.geteuid():
            raise ConfigError("backend 'docker' joins containers, which needs root; use 'oci' or 'local' without it")
        self._init = find_sleeper(self.name)
        async with engine.reach() as self._engine:
            info = await self._engine.info()
            self._version = str(info.get("ServerVersion"))
            self._images = await self._engine.tags()
            async with (
                launching.launch(self.name, self._prepare, self._home) as launcher,
                background_tasks() as group,
            ):
                self._recall(launcher)
                await self._tidy()
                group.start_soon(self._keep_tidy)
                yield
            await self._remove_all()

    async def _prepare(self) -> dict[str, Any]:
        base = state_bases(self._home.path if self._home else None)[0]
        return {
            "isolated": True,
            "state": str(await anyio.to_thread.run_sync(launching.make_state, base, None)),
            "base_uid": None,
            "run_as": None,
            "run_dir": "/run/skyenv",
            "cgroups": await anyio.to_thread.run_sync(cgroups.find),
        }

    def _recall(self, launcher: launching.Launcher) -> None:
        """Know what a former node server left: its sandboxes, their images' variables, its snapshots."""
        self._launcher, self._state = launcher, Path(launcher.config["state"])
        self._hierarchies = [cgroups.Hierarchy(*each) for each in launcher.config["cgroups"]]
        self._alive.update(held.sandbox for held in launcher.held)
        self._environments.update({name: fact for name, fact in launcher.kept.items() if isinstance(fact, dict)})
        shells = {name: fact for name, fact in launcher.kept.items() if isinstance(fact, str)}
        self._shells.update({name: shell.encode("latin-1") for name, shell in shells.items()})

    @property
    def _open_engine(self) -> engine.ContainerEngine:
        if self._engine is None:
            raise ConfigError("the backend is not open")
        return self._engine

    def describe(self) -> dict[str, Any]:
        """The engine and which limits hold."""
        fallback = {"memory": "rlimit", "pids": "not limited", "cpu": "affinity only", "file_size": "rlimit"}
        grouped = {name: f"cgroup v{each.version}" for each in self._hierarchies for name in each.controllers}
        return {
            "backend": self.name,
            "isolated": True,
            "mode": "root",
            "overlay": True,
            "engine": {"host": engine.engine_host(), "version": self._version, "runtime": self._runtime},
            "limits": {**fallback, **grouped, "disk": "by the engine, if its storage can"},
            "notes": [],
        }

    def environment(self, sandbox: str) -> dict[str, str]:
        """The usual defaults and what the image sets."""
        return {**DEFAULT_ENV, "PATH": SEARCH_PATH, **self._environments.get(sandbox, {})}

    def images(self) -> list[str]:
        """The engine's tags, as of the last pull."""
        return self._images

    async def pull(self, image: str) -> None:
        """See `Backend.pull`. Once an engine has an image under this name, its registry is not asked again."""
        lock = self._pulls.setdefault(image, anyio.Lock())
        async with lock:
            if await self._open_engine.image(image) is None:
                await self._open_engine.pull(image)
                self._images = await self._open_engine.tags()

    async def create(self, sandbox: str, request: CreateRequest, record: Record) -> socket.socket:
        """Start a container and join it. ConfigError for an image or a snapshot that cannot be had."""
        if request.spec.network != "none":
            raise ConfigError("network: backend 'docker' gives its sandboxes none; leave it out")
        image = await self._image_of(request)
        found = await self._open_engine.image(image)
        if found is None:
            raise SandboxUnavailable(f"image {image} was removed from the engine just now", engine.RETRY_AFTER)
        _check_machine(image, found)
        self._environments[sandbox] = _variables(found)
        self._alive.add(sandbox)
        try:
            async with self._starts:
                identity, pid = await self._start(sandbox, image, request.spec)
            config = spec_config(request.spec) | {
                "name": sandbox,
                "number": next(self._numbers),
                "home": str((found["Config"] or {}).get("WorkingDir") or "/root"),
                "target": pid,
                "sign": identity,
                "keep": {sandbox: self._environments[sandbox]},
            }
            return await self._running.create(config, record)
        except SkyEnvError:
            self._alive.discard(sandbox)
            await self._open_engine.remove(self._container(sandbox))
            raise

    async def _image_of(self, request: CreateRequest) -> str:
        if request.snapshot is not None:
            reference = f"{SNAPSHOTS}:{request.snapshot}"
            if await self._open_engine.image(reference) is None:
                raise ConfigError(f"snapshot {request.snapshot!r} does not exist on this node")
            return reference
        image = request.image or self._default
        if image is None:
            raise ConfigError("image: backend 'docker' needs one, in the request or as the node's default")
        await self.pull(image)
        return image

    async def _start(self, sandbox: str, image: str, spec: Spec) -> tuple[str, int]:
        """A container whose first process only sleeps. Limits are also told to the engine, for whoever looks there."""
        host = {
            "auto_remove": True,
            "binds": [f"{self._init}:{INIT}:ro"],
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "network_mode": "none",
            "mem_limit": spec.memory_bytes,
            "memswap_limit": spec.memory_bytes,
            "nano_cpus": None if spec.cpus is None else round(spec.cpus * 1e9),
            "pids_limit": spec.pids,
            "shm_size": spec.tmpfs_bytes,
            "storage_opt": None if spec.disk_bytes is None else {"size": str(spec.disk_bytes)},
            "log_config": {"type": "none", "config": {}},
            "runtime": self._runtime,
        }
        return await self._open_engine.start(
            self._container(sandbox),
            image,
            host,
            entrypoint=[INIT],
            command=["-P"],
            user="0:0",
            hostname="sandbox",
            healthcheck={"test": ["NONE"]},
            labels=self._labels(snapshot="no"),
        )

    def _labels(self, *, snapshot: str) -> dict[str, str]:
        return {STATE_LABEL: str(self._state), HOST_LABEL: _host(), SNAPSHOT_LABEL: snapshot}

    def _container(self, sandbox: str) -> str:
        return f"{PREFIX}{sandbox}"

    async def destroy(self, sandbox: str) -> None:
        """Kill it, container included; the engine removes what is left soon after."""
        await self._running.ask({"op": "destroy", "name": sandbox})
        self._alive.discard(sandbox)
        if self._environments.pop(sandbox, None) is not None:
            await self._running.keep({sandbox: None})
        self._untidy.set()

    async def snapshot(self, sandbox: str, shell: bytes, *, idle: bool = False) -> str:
        """Commit the container's files as an image."""
        name = secrets.token_hex(16)
        self._shells[name] = shell
        try:
            labels = self._labels(snapshot="yes")
            await self._open_engine.commit(self._container(sandbox), f"{SNAPSHOTS}:{name}", labels)
        except SkyEnvError:
            del self._shells[name]
            raise
        await self._running.keep({name: shell.decode("latin-1")})
        return name

    def shell_state(self, snapshot: str) -> bytes:
        """What `snapshot` was given."""
        return self._shells.get(snapshot, b"")

    async def delete_snapshot(self, snapshot: str) -> None:
        """Untag the image; its layers go once no container needs them."""
        if self._shells.pop(snapshot, None) is not None:
            await self._running.keep({snapshot: None})
        await self._open_engine.remove_image(f"{SNAPSHOTS}:{snapshot}")
        self._untidy.set()

    async def _keep_tidy(self) -> None:
        """Look after what the engine should have removed by itself, whenever something was destroyed."""
        while True:
            await self._untidy.wait()
            await anyio.sleep(TIDY_INTERVAL)
            self._untidy = anyio.Event()
            try:
                await self._tidy()
            except SkyEnvError as error:
                LOG.warning("the engine was not tidied: %s", error)

    async def _tidy(self) -> None:
        """Remove containers and snapshots of nodes that are gone, and this node's that nobody uses."""
        mine = {self._container(name) for name in self._alive}
        for name, labels in await self._open_engine.containers(STATE_LABEL):
            if name not in mine and await self._is_over(labels):
                await self._open_engine.remove(name)
        kept = {f"{SNAPSHOTS}:{name}" for name in self._shells}
        for reference, labels in await self._open_engine.snapshots(f"{SNAPSHOT_LABEL}=yes"):
            if reference not in kept and await self._is_over(labels):
                await self._open_engine.remove_image(reference)

    async def _is_over(self, labels: Mapping[str, str]) -> bool:
        """Whether what carries these labels is this node's, or a dead node's of this machine."""
        state, host = labels.get(STATE_LABEL, ""), labels.get(HOST_LABEL, "")
        if state == str(self._state):
            return True
        boot, _colon, view = host.partition(":")
        own_boot, _colon, own_view = _host().partition(":")
        if boot != own_boot:
            return True
        return view == own_view and await anyio.to_thread.run_sync(_is_dead, Path(state, "lock"))

    async def _remove_all(self) -> None:
        """The launcher has killed every container; the engine is removing them, or this does."""
        self._alive.clear()
        self._shells.clear()
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT):
            try:
                await self._tidy()
                while await self._open_engine.containers(f"{STATE_LABEL}={self._state}"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            except SkyEnvError as error:
                LOG.warning("containers of %s may be left in the engine: %s", self._state, error)


def _host() -> str:
    """Names this boot of this machine, and the mounts that a path is looked up in."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/mnt').stat().st_ino}"


def _is_dead(lock: Path) -> bool:
    try:
        return launching.is_abandoned(lock)
    except FileNotFoundError:
        return True


def _variables(image: Mapping[str, Any]) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in (image["Config"] or {}).get("Env") or ())
    return {name: value for name, _equals, value in pairs}


def _check_machine(reference: str, image: Mapping[str, Any]) -> None:
    ours, theirs = _MACHINES.get(platform.machine()), image.get("Architecture")
    if ours and theirs and ours != theirs:
        raise ConfigError(f"image {reference} is made for {theirs}; this node is {ours}")
