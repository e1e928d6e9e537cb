"""OCI runtimes and what they are told: which is here, how it is called, and the configuration of a container.

A container's only process is `catatonit -P`, which sleeps. It keeps namespaces and a root for the init that joins it,
so whatever the runtime, the sandbox's own limits, masks and filters are those of the init.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyenv.errors import ConfigError

PREFERRED = ("crun", "runc")
SLEEPER = "/run/skyenv/init"  # below what the init covers with a file system of its own
TIMEOUT = 10.0
USERS = 65536
SLEEPER_PLACES = (
    "/usr/libexec/podman/catatonit", "/usr/libexec/catatonit/catatonit", "/usr/lib/podman/catatonit",
)  # fmt: skip
_MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/acpi", "/proc/scsi")
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


def find_sleeper(backend: str, places: Sequence[str] = SLEEPER_PLACES) -> str:
    """Where catatonit is, a container's sleeping first process. ConfigError naming the package."""
    found = shutil.which("catatonit") or next((path for path in places if os.access(path, os.X_OK)), None)
    if found is None:
        raise ConfigError(
            f"backend {backend!r} needs catatonit, a container's sleeping first process: install catatonit"
        )
    return os.path.realpath(found)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime by path. `kind` is the first word of what it says of its version."""

    path: str
    kind: str
    version: str

    @property
    def makes_groups(self) -> bool:
        """Whether it insists on control groups of its own making."""
        return self.kind != "crun"

    def command(self) -> list[str]:
        """How to call it."""
        return [self.path] if self.makes_groups else [self.path, "--cgroup-manager=disabled"]


def candidates(chosen: str | None) -> tuple[list[Runtime], list[str]]:
    """The runtimes to try, best first, and why others are not among them. `chosen` is a name or a path."""
    found, reasons = [], []
    for name in (chosen,) if chosen else PREFERRED:
        path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")
        if path is None:
            reasons.append(f"{name}: not installed")
            continue
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{name}: {error}")
            continue
        words = said.stdout.split() or [Path(path).name]
        found.append(Runtime(path, words[0], " ".join(words[:3])))
    return found, reasons


def bundle(
    *, base_uid: int | None, sleeper: str, tmpfs_bytes: int, groups: str | None = None, network: str = "none"
) -> dict[str, Any]:
    """A container's configuration; whoever runs it adds the root and what /sys shows.

    `base_uid` is None when we are in a user namespace already.
    Without real privileges nothing of /proc is masked, because the kernel then refuses the init a /proc of its own.
    """
    spaces = ["pid", "ipc", "uts", "mount"]
    spaces += ["user"] if base_uid is not None else []
    spaces += ["network"] if network == "none" else []
    linux: dict[str, Any] = {"namespaces": [{"type": kind} for kind in spaces]}
    if base_uid is not None:
        mapping = [{"containerID": 0, "hostID": base_uid, "size": USERS}]
        linux |= {"uidMappings": mapping, "gidMappings": mapping}
        linux |= {"maskedPaths": list(_MASKED), "readonlyPaths": list(_READ_ONLY)}
    if groups is not None:
        linux |= {"cgroupsPath": groups, "resources": {"devices": [{"allow": False, "access": "rwm"}]}}
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [SLEEPER, "-P"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted")},
        },
        "mounts": _mounts(sleeper, tmpfs_bytes) + (_resolver() if network != "none" else []),
        "linux": linux,
    }


def _mounts(sleeper: str, tmpfs_bytes: int) -> list[dict[str, Any]]:
    def mount(place: str, kind: str, source: str, *options: str) -> dict[str, Any]:
        return {"destination": place, "type": kind, "source": source, "options": ["nosuid", *options]}

    size = f"size={tmpfs_bytes}"
    return [
        mount("/proc", "proc", "proc", "nodev", "noexec"),
        mount("/dev", "tmpfs", "tmpfs", "mode=755", "size=65536"),
        mount("/dev/pts", "devpts", "devpts", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
        mount("/dev/shm", "tmpfs", "tmpfs", "nodev", "mode=1777", size),
        mount("/sys", "bind", "", "rbind", "ro", "nodev", "noexec"),
        mount("/run", "tmpfs", "tmpfs", "nodev", "mode=755", size),
        mount("/run/skyenv", "tmpfs", "tmpfs", "nodev", "mode=711", "size=4096"),
        mount(SLEEPER, "bind", sleeper, "bind", "ro", "nodev"),
    ]


def _resolver() -> list[dict[str, Any]]:
    """Names are resolved as on the host."""
    source = Path("/etc/resolv.conf").resolve()
    bind = {"destination": "/etc/resolv.conf", "type": "bind", "source": str(source)}
    return [bind | {"options": ["bind", "ro", "nosuid", "nodev"]}] if source.exists() else []
