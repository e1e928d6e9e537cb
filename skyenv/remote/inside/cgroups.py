"""Control groups, versions 1 and 2: which limits can be set here, setting them, counting and freezing.

`find` looks for directories in which this process may create groups. A `Group` is the set of directories (one for
each hierarchy) of one sandbox; whoever made it removes it once nothing runs in it.
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import NamedTuple

LIMITING = ("memory", "pids", "cpu")
CONTROLLERS = (*LIMITING, "cpuacct", "freezer")
BUILT_IN = ("cpuacct", "freezer")  # every group of version 2 counts processor time and can be frozen
PERIOD = 100_000  # microseconds
RECORD = "cgroups.json"  # in a state directory: where its groups are, for whoever must clean up


class Hierarchy(NamedTuple):
    """A directory in which groups can be created, and the controllers that they will have."""

    version: int
    parent: str
    controllers: tuple[str, ...]


class Limits(NamedTuple):
    """What a group may use; None leaves it unlimited. `cpus` is a number of processors, possibly fractional."""

    memory_bytes: int | None = None
    pids: int | None = None
    cpus: float | None = None


def find(proc: str = "/proc/self") -> list[Hierarchy]:
    """The hierarchies in which this process can create groups with at least one controller of ours."""
    own = _own_groups(f"{proc}/cgroup")
    found: list[Hierarchy] = []
    for kind, options, mount_root, mount_point in _mounts(f"{proc}/mountinfo"):
        if kind == "cgroup":
            names = tuple(name for name in CONTROLLERS if name in options)
            candidates = _upwards(own.get(names[0], "/"), mount_root, mount_point) if names else []
            usable = next((path for path in candidates if _can_create(path)), None)
            if usable:
                found.append(Hierarchy(1, usable, names))
        elif kind == "cgroup2":
            for path in _upwards(own.get("", "/"), mount_root, mount_point):
                names = _enable(path)
                if names and _can_create(path):
                    found.append(Hierarchy(2, path, (*names, *BUILT_IN)))
                    break
    taken: set[str] = set()
    unique = []
    for hierarchy in found:
        names = tuple(name for name in hierarchy.controllers if name not in taken)
        taken.update(names)
        if names:
            unique.append(Hierarchy(hierarchy.version, hierarchy.parent, names))
    return unique


def everywhere(found: list[Hierarchy], proc: str = "/proc/self") -> tuple[str, list[Hierarchy]]:
    """For a program that makes a group of one name in every hierarchy: the path to make it in, and all of those.

    Hierarchies that are not among `found` come without controllers: nobody joins them, but they are cleaned up.
    """
    mounts = _mounts(f"{proc}/mountinfo")
    below = "/"
    for hierarchy in found[:1]:
        point = max((each[3] for each in mounts if hierarchy.parent.startswith(each[3])), key=len, default="")
        below = hierarchy.parent.removeprefix(point) or "/"
    known = {hierarchy.parent for hierarchy in found}
    places = [(2 if kind == "cgroup2" else 1, f"{point}{below}".rstrip("/")) for kind, _o, _r, point in mounts]
    return below, [*found, *(Hierarchy(version, path, ()) for version, path in places if path not in known)]


def _own_groups(path: str) -> dict[str, str]:
    groups = {}
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            _number, names, group = line.rstrip("\n").split(":", 2)
            for name in names.split(","):
                groups[name] = group
    return groups


def _mounts(path: str) -> list[tuple[str, list[str], str, str]]:
    mounts = []
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            before, _separator, after = line.partition(" - ")
            fields, rest = before.split(), after.split()
            if rest[0] in ("cgroup", "cgroup2"):
                mounts.append((rest[0], rest[2].split(","), fields[3], fields[4]))
    return mounts


def _upwards(group: str, mount_root: str, mount_point: str) -> list[str]:
    """The directory of `group` and those above it, up to the mount point."""
    relative = os.path.relpath(group, mount_root)
    parts = [] if relative == "." or relative.startswith("..") else relative.split("/")
    return ["/".join([mount_point, *parts[:length]]) for length in range(len(parts), -1, -1)]


def _can_create(parent: str) -> bool:
    path = f"{parent}/skyenv-probe-{os.getpid()}"
    try:
        os.mkdir(path)
        os.rmdir(path)
    except OSError:
        return False
    return True


def _enable(path: str) -> tuple[str, ...]:
    """Which controllers children of a version 2 group have, after asking for those that are missing."""
    offered, control = _read(f"{path}/cgroup.controllers").split(), f"{path}/cgroup.subtree_control"
    for name in LIMITING:
        if name in offered and name not in _read(control).split():
            with contextlib.suppress(OSError):
                _write(control, f"+{name}")
    enabled = _read(control).split()
    return tuple(name for name in LIMITING if name in enabled)


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""


def _write(path: str, value: str) -> None:
    with open(path, "w") as file:
        file.write(value)


def _table(path: str) -> dict[str, int]:
    """A file of names and whole numbers."""
    pairs = [line.split() for line in _read(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


class Group(NamedTuple):
    """The groups of one sandbox, one directory in each hierarchy."""

    directories: tuple[tuple[Hierarchy, str], ...]

    @staticmethod
    def of(hierarchies: list[Hierarchy], name: str) -> Group:
        """The groups called `name`, whether they exist or not."""
        return Group(tuple((each, f"{each.parent}/{name}") for each in hierarchies))

    @staticmethod
    def create(hierarchies: list[Hierarchy], name: str, limits: Limits) -> Group:
        """Make the directories, as far as nobody did, and set the limits. OSError when the kernel refuses."""
        made = []
        for hierarchy in hierarchies:
            if not hierarchy.controllers:
                continue
            path = f"{hierarchy.parent}/{name}"
            os.makedirs(path, exist_ok=True)
            made.append((hierarchy, path))
            for file, value in _settings(hierarchy, limits):
                _write(f"{path}/{file}", value)
            for file, value in _wishes(hierarchy, limits):
                with contextlib.suppress(OSError):
                    _write(f"{path}/{file}", value)
        return Group(tuple(made))

    def join(self) -> None:
        """Move this single-threaded process in.

        In version 1 a thread that moves itself needs no global lock; `cgroup.procs` would wait some 20 ms for it.
        """
        for hierarchy, path in self.directories:
            _write(f"{path}/cgroup.procs" if hierarchy.version == 2 else f"{path}/tasks", "0")

    def open_oom_counter(self) -> int | None:
        """A descriptor of the file that counts OOM kills, for `oom_kills`; None without a memory controller."""
        for hierarchy, path in self.directories:
            if "memory" in hierarchy.controllers:
                name = "memory.events" if hierarchy.version == 2 else "memory.oom_control"
                return os.open(f"{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return None

    def _having(self, controller: str) -> tuple[int, str] | None:
        """Version and directory of the group with this controller."""
        for hierarchy, path in self.directories:
            if controller in hierarchy.controllers:
                return hierarchy.version, path
        return None

    @property
    def freezer(self) -> tuple[int, str] | None:
        """Version and directory of the group that can be frozen, if there is one."""
        return self._having("freezer")

    def freeze(self, wanted: bool) -> bool:
        """Stop everything inside, or let it go on. False: not all has stopped yet (or nothing can be), ask again."""
        if self.freezer is None:
            return False
        version, path = self.freezer
        if version == 2:
            _write(f"{path}/cgroup.freeze", "1" if wanted else "0")
            return f"frozen {int(wanted)}\n" in _read(f"{path}/cgroup.events")
        _write(f"{path}/freezer.state", "FROZEN" if wanted else "THAWED")
        return _read(f"{path}/freezer.state").strip() == ("FROZEN" if wanted else "THAWED")

    def usage(self) -> dict[str, int | float]:
        """What the group uses now, as far as something counts it: bytes, seconds, numbers. See `backends.Stats`."""
        return {**self._memory(), **self._processes(), **self._processor()}

    def _memory(self) -> dict[str, int | float]:
        """Without the file cache that the kernel would drop at once."""
        found = self._having("memory")
        if found is None:
            return {}
        version, path = found
        table = _table(f"{path}/memory.stat")
        used, cache = ("memory.current", "inactive_file")
        kills = _table(f"{path}/memory.events")
        if version == 1:
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
            kills = _table(f"{path}/memory.oom_control")
        text = _read(f"{path}/{used}")
        if not text:
            return {}
        return {"memory_bytes": max(0, int(text) - table.get(cache, 0)), "oom_kills": kills.get("oom_kill", 0)}

    def _processes(self) -> dict[str, int | float]:
        found = self._having("pids")
        text = _read(f"{found[1]}/pids.current") if found else ""
        return {"pids": int(text)} if text else {}

    def _processor(self) -> dict[str, int | float]:
        found = self._having("cpuacct")
        if found is None:
            return {}
        version, path = found
        if version == 2:
            micros = _table(f"{path}/cpu.stat").get("usage_usec")
            return {} if micros is None else {"cpu_seconds": micros / 1e6}
        text = _read(f"{path}/cpuacct.usage")
        return {"cpu_seconds": int(text) / 1e9} if text else {}

    def remove(self) -> bool:
        """Remove the directories; False while something still runs inside one of them."""
        for _hierarchy, path in self.directories:
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


def _settings(hierarchy: Hierarchy, limits: Limits) -> list[tuple[str, str]]:
    """What must be written."""
    second = hierarchy.version == 2
    settings = []
    if "memory" in hierarchy.controllers and limits.memory_bytes is not None:
        settings.append(("memory.max" if second else "memory.limit_in_bytes", str(limits.memory_bytes)))
    if "pids" in hierarchy.controllers and limits.pids is not None:
        settings.append(("pids.max", str(limits.pids)))
    if "cpu" in hierarchy.controllers and limits.cpus is not None:
        quota = math.ceil(limits.cpus * PERIOD)
        if second:
            settings.append(("cpu.max", f"{quota} {PERIOD}"))
        else:
            settings += [("cpu.cfs_period_us", str(PERIOD)), ("cpu.cfs_quota_us", str(quota))]
    return settings


def _wishes(hierarchy: Hierarchy, limits: Limits) -> list[tuple[str, str]]:
    """What is written where the kernel has it: no swap, and an OOM kill that takes one process, not all."""
    if "memory" not in hierarchy.controllers:
        return []
    if hierarchy.version == 2:
        return [("memory.swap.max", "0"), ("memory.oom.group", "0")]
    memory = str(limits.memory_bytes) if limits.memory_bytes is not None else "-1"
    return [("memory.memsw.limit_in_bytes", memory), ("memory.swappiness", "0")]


def oom_kills(counter: int | None) -> int:
    """How many processes were killed for want of memory so far."""
    if counter is None:
        return 0
    with contextlib.suppress(OSError, ValueError):
        for line in os.pread(counter, 4096, 0).split(b"\n"):
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0
