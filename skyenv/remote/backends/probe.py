"""What this machine allows: tried, not guessed. Each way of isolating is attempted once in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from skyenv.remote.backends import launching, skeleton

Mode = Literal["root", "rootless"]
BASE_UID = 1_500_000_000
TIMEOUT = 20.0

_ADVICE = (
    ("): No space left", "raise sysctl user.max_user_namespaces and its siblings"),
    ("-trial'", "the surrounding container has too few user ids for this mode"),
    ("unshare(0x10000000)", "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu 24.04 "
     "or later kernel.apparmor_restrict_unprivileged_userns=0; in a container run it with --privileged or a seccomp "
     "profile that allows unshare"),
    ("unshare", "allow namespaces: run as root with CAP_SYS_ADMIN, or enable user namespaces"),
    ("mount proc", "the outer container masks /proc, which forbids a fresh one; run it with "
     "--security-opt systempaths=unconfined"),
    ("mount overlay", "set SKYENV_STATE_DIR to a directory on ext4, xfs or tmpfs, not on an overlay"),
    ("mount_setattr", "Linux 5.12 or newer is needed"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe:
    """What the `local` backend can do here.

    `reasons` say why something is missing, each with what to change. `limits` maps memory, pids and cpu to what
    enforces them: "cgroup v1", "cgroup v2", "rlimit", "affinity only" or "not limited".
    """

    usable: bool
    mode: Mode | None
    overlay: bool
    base: Path
    cgroups: tuple[tuple[int, str, tuple[str, ...]], ...]
    reasons: tuple[str, ...]

    def save(self) -> dict[str, Any]:
        """As JSON takes it, for `restore`."""
        return {**asdict(self), "base": str(self.base)}

    @staticmethod
    def restore(saved: dict[str, Any]) -> Probe:
        """What `save` saved."""
        groups = tuple((version, parent, tuple(names)) for version, parent, names in saved["cgroups"])
        return Probe(**{**saved, "base": Path(saved["base"]), "cgroups": groups, "reasons": tuple(saved["reasons"])})

    @property
    def limits(self) -> dict[str, str]:
        """What enforces each limit."""
        fallback = {"memory": "rlimit", "pids": "rlimit", "cpu": "affinity only", "file_size": "rlimit"}
        fallback["freezer"] = "signals"
        fallback["disk"] = "tmpfs when disk_bytes is given" if self.mode == "root" else "not limited"
        return fallback | grouped_by(self.cgroups)


def grouped_by(hierarchies: Sequence[tuple[int, str, Sequence[str]]]) -> dict[str, str]:
    """What control groups enforce or can do here."""
    found = {name: f"cgroup v{version}" for version, _parent, names in hierarchies for name in names}
    return {name: where for name, where in found.items() if name != "cpuacct"}


def state_bases(home: Path | None = None) -> list[Path]:
    """Where the state directory may lie, best first; `home` and then SKYENV_STATE_DIR override."""
    chosen = home or os.environ.get("SKYENV_STATE_DIR")
    return [Path(chosen)] if chosen else [Path(tempfile.gettempdir()), Path("/dev/shm")]


def probe(run_as: int | None = None, home: Path | None = None) -> Probe:
    """Find the best way in which sandboxes can be isolated here; takes some 50 ms. `run_as` gives up root first."""
    reasons: list[str] = []
    for mode, overlay, base in _ways(run_as, state_bases(home)):
        answer = _attempt(mode, overlay, base, run_as)
        if answer["error"] is None:
            groups = tuple((version, parent, tuple(names)) for version, parent, names in answer["cgroups"])
            missing = sorted({"memory", "pids", "cpu"} - {name for _v, _p, names in groups for name in names})
            if missing:
                reasons.append(
                    f"no control group for {', '.join(missing)}: run as root, or delegate one "
                    "(systemd-run --user --scope -p Delegate=yes)"
                )
            if not overlay:
                reasons.append("no overlay file system: each sandbox starts with a copy of its files")
            return Probe(True, mode, overlay, base, groups, tuple(reasons))
        reasons.append(f"{mode}{'' if overlay else ' without overlay'} in {base}: {_explain(answer['error'])}")
    return Probe(False, None, False, state_bases(home)[0], (), tuple(dict.fromkeys(reasons)))


def _ways(run_as: int | None, bases: Sequence[Path]) -> Iterator[tuple[Mode, bool, Path]]:
    if os.geteuid() == 0 and run_as is None:
        yield from (("root", True, base) for base in bases)
    yield from (("rootless", True, base) for base in bases)
    yield "rootless", False, bases[0]


def _attempt(mode: Mode, overlay: bool, base: Path, run_as: int | None) -> dict[str, Any]:
    owner = BASE_UID if mode == "root" else run_as
    try:
        state = launching.make_state(base, run_as)
    except OSError as error:
        return {"error": str(error)}
    try:
        binds = skeleton.system_binds(owner, mounted_by_root=mode == "root")
        name = f"{state.name}-trial"
        for folder in (state / "skeleton", state / name / "upper"):
            skeleton.build_directories(folder, binds)
        if owner is not None:
            for made, _names, _files in os.walk(state):
                os.chown(made, owner, owner)
        config = shared_config(state, mode, overlay, binds, run_as) | own_config(state, name, overlay)
        result = subprocess.run(
            launching.command("trial"),
            input=json.dumps(config),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=launching.environment(),
            check=False,
        )
        return _parse(result)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    finally:
        shutil.rmtree(state, ignore_errors=True)


def _parse(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        return {"error": f"the attempt ended with status {result.returncode}: {result.stderr.strip()[-500:]}"}
    return answer


def _explain(error: str) -> str:
    advice = next((text for sign, text in _ADVICE if sign in error), "see the message")
    return f"{error} ({advice})"


def shared_config(state: Path, mode: Mode, overlay: bool, binds: Sequence[str], run_as: int | None) -> dict[str, Any]:
    """What all sandboxes of a launcher have in common."""
    return {
        "isolated": True,
        "state": str(state),
        "base_uid": BASE_UID if mode == "root" else None,
        "run_as": run_as,
        "overlay": overlay,
        "network": "none",
        "binds": list(binds),
        "cgroups": [],
        "run_dir": "/run/skyenv",
        "home": "/root",
    }


def own_config(state: Path, sandbox: str, overlay: bool) -> dict[str, Any]:
    """What a sandbox has for itself, before its spec."""
    top = state / sandbox
    return {
        "name": sandbox,
        "number": 0,
        "upper": str(top / "upper"),
        "work": str(top / "work"),
        "root": str(top / "root"),
        "lower": [str(state / "skeleton")] if overlay else [],
        "snapshot": None,
        "shells": ["/bin/bash", "/usr/bin/bash"],
        "memory_bytes": 512 << 20,
        "pids": 64,
        "cpus": 1.0,
        "file_bytes": 1 << 30,
        "disk_bytes": None,
        "tmpfs_bytes": 1 << 20,
    }
