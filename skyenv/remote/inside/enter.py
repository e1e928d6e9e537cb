"""From a forked child to process 1 of a sandbox: control groups, namespaces, the private root, dropped privileges.

The root is an overlay: the node's skeleton and snapshot layers below, the sandbox's own directory on top. The host's
system directories are read-only binds in it. As root (`base_uid` set) mounts are made with real privileges and then a
user namespace maps the sandbox's users to an unprivileged range of host users; without root the user namespace comes
first and maps one user. Either way the result has few capabilities, no new privileges and no way to a new namespace.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from . import kernel, mounts, seccomp
from .cgroups import Group, Hierarchy, Limits

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
RUN_DIRECTORY = "/run/skyenv"
MAPPED_USERS = 65536
_SPACES = kernel.NEWPID | kernel.NEWNET | kernel.NEWUTS | kernel.NEWIPC | kernel.NEWCGROUP
_MASKED = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats", "kmsg", "sysrq-trigger")
_READ_ONLY = ("sys", "bus", "fs", "irq")
_EMPTY = ("acpi", "scsi")


def limits_of(config: dict[str, Any]) -> Limits:
    """The cgroup limits in a create request."""
    return Limits(config["memory_bytes"], config["pids"], config["cpus"])


def join_group(config: dict[str, Any]) -> int | None:
    """Create and join the sandbox's control groups; returns the descriptor of the OOM counter."""
    hierarchies = [Hierarchy(*entry) for entry in config["cgroups"]]
    group = Group.create(hierarchies, config["name"], limits_of(config))
    group.join()
    return group.open_oom_counter()


def set_rlimits(config: dict[str, Any]) -> None:
    """No core dumps, a file size limit, and memory and process limits where no control group sets them."""
    grouped = {name for _version, _parent, names in config["cgroups"] for name in names}
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: config["file_bytes"]}
    if "memory" not in grouped:
        # Not RLIMIT_AS: runtimes such as V8 and the JVM reserve far more addresses than they use.
        wanted[resource.RLIMIT_DATA] = config["memory_bytes"]
    if "pids" not in grouped and config["isolated"]:
        wanted[resource.RLIMIT_NPROC] = config["pids"]
    for kind, value in wanted.items():
        if value is not None:
            hard = resource.getrlimit(kind)[1]
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, limit))


def set_affinity(config: dict[str, Any]) -> None:
    """Pin to as many processors as the sandbox may use, so that `nproc` tells the truth."""
    if config["cpus"] is not None:
        usable = sorted(os.sched_getaffinity(0))
        count = min(len(usable), max(1, -(-int(config["cpus"] * 1000) // 1000)))
        first = config["number"] % len(usable)
        os.sched_setaffinity(0, {usable[(first + step) % len(usable)] for step in range(count)})


def start(config: dict[str, Any], report: int, become_init: Callable[[int | None], NoReturn]) -> None:
    """In a fresh child: enter the namespaces, fork process 1 and leave. Writes its pid (of here) to `report`.

    Process 1 never returns from here: it calls `become_init` with the OOM counter's descriptor.
    """
    counter = join_group(config)
    set_affinity(config)
    rootless = config["base_uid"] is None
    if rootless:
        map_single_user()
    kernel.unshare(_SPACES if config["network"] == "none" else _SPACES & ~kernel.NEWNET)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        os.write(report, str(pid).encode())
        theirs.close()
        if not rootless and ours.recv(1):
            _map_users(pid, config["base_uid"])
            ours.send(b"1")
        return
    os.close(report)
    ours.close()
    _build_root(config)
    _finish(config, theirs, rootless)
    theirs.close()
    become_init(counter)


def map_single_user() -> None:
    """Be root in a user namespace that knows nobody else."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {uid} 1")
    write("/proc/self/gid_map", f"0 {gid} 1")


def _map_users(pid: int, base: int) -> None:
    for kind in ("uid", "gid"):
        write(f"/proc/{pid}/{kind}_map", f"0 {base} {MAPPED_USERS}")


def write(path: str, value: str) -> None:
    """Write a small file, as the kernel's interfaces want it."""
    with open(path, "w") as file:
        file.write(value)


def _build_root(config: dict[str, Any]) -> None:
    root, owner = config["root"], config["base_uid"] or 0
    kernel.leave_mount_namespace()
    mount_root(config)
    for path in filter(partial(_is_folder, root), config["binds"]):
        kernel.bind(path, root + path)
        kernel.restrict_mount(root + path, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
    kernel.mount("proc", root + "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _mount_dev(root + "/dev", owner, config)
    mount_tmpfs(root + "/run", owner, 0o755, config["tmpfs_bytes"])
    os.mkdir(root + RUN_DIRECTORY)
    mount_tmpfs(root + RUN_DIRECTORY, owner, 0o711, config["tmpfs_bytes"])
    _mount_sys(root + "/sys", owner)
    if config["network"] != "none":
        _bind_resolver(root + "/etc")


def _bind_resolver(etc: str) -> None:
    """Names are resolved as on the host."""
    for source, name in ((f"{etc}/nsswitch.network", "nsswitch.conf"), ("/etc/resolv.conf", "resolv.conf")):
        if os.path.exists(source) and os.path.exists(f"{etc}/{name}"):
            kernel.bind(os.path.realpath(source), f"{etc}/{name}")
            kernel.restrict_mount(f"{etc}/{name}", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)


def _is_folder(root: str, path: str) -> bool:
    """Whether a directory is where it was: whoever had these files before may have moved it, or put links there."""
    current = root
    for name in path.strip("/").split("/"):
        current += "/" + name
        if not os.path.isdir(current) or os.path.islink(current):
            return False
    return True


def mount_root(config: dict[str, Any]) -> None:
    """The sandbox's files at their place, in the current mount namespace."""
    root = config["root"]
    if not config["overlay"]:
        kernel.bind(config["upper"], root)
        return
    user = config["base_uid"] is None
    mounts.attach(mounts.overlay(config["lower"], config["upper"], config["work"], user=user), root)


def mount_tmpfs(target: str, owner: int, mode: int, size: int) -> None:
    """A file system in memory of at most `size` bytes."""
    data = f"mode={mode:o},size={size},uid={owner},gid={owner}"
    kernel.mount("tmpfs", target, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, data)


def _mount_dev(dev: str, owner: int, config: dict[str, Any]) -> None:
    data = f"mode=755,size=65536,uid={owner},gid={owner}"
    kernel.mount("tmpfs", dev, "tmpfs", kernel.MS_NOSUID, data)
    for name in DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.bind(f"/dev/{name}", f"{dev}/{name}")
    for name in ("shm", "pts"):
        os.mkdir(f"{dev}/{name}")
        os.chown(f"{dev}/{name}", owner, owner)
    mount_tmpfs(f"{dev}/shm", owner, 0o1777, config["tmpfs_bytes"])
    kernel.mount("devpts", f"{dev}/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, "newinstance,ptmxmode=0666")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        os.symlink(target, f"{dev}/{name}")


def _mount_sys(sys: str, owner: int) -> None:
    """Nothing of the host but the processors that this sandbox may use, where libraries look for their number."""
    mount_tmpfs(sys, owner, 0o755, 65536)
    path = sys + "/devices/system/cpu"
    os.makedirs(path)
    tell_processors(path)
    kernel.restrict_mount(sys, kernel.ATTR_RDONLY)


def tell_processors(path: str) -> None:
    """Write the files in which libraries look for the number of processors; it is that of this process."""
    count = len(os.sched_getaffinity(0))
    for name in ("online", "possible", "present"):
        write(f"{path}/{name}", f"0-{count - 1}\n" if count > 1 else "0\n")


def _finish(config: dict[str, Any], parent: socket.socket, rootless: bool) -> None:
    kernel.pivot_into(config["root"])
    own_network = config["network"] == "none"
    if own_network:
        kernel.raise_loopback()
    socket.sethostname("sandbox")
    if own_network and not rootless:
        with contextlib.suppress(OSError):
            write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")
    sysctl = os.open("/proc/sys", os.O_PATH | os.O_CLOEXEC)
    mask_proc()
    if not rootless:
        kernel.unshare(kernel.NEWUSER)
        parent.send(b"1")
        if not parent.recv(1):
            raise OSError("the user map could not be written")
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    with contextlib.suppress(OSError):
        file = os.open("user/max_user_namespaces", os.O_WRONLY, dir_fd=sysctl)
        os.write(file, b"0")
        os.close(file)
    os.close(sysctl)
    give_up_privileges(config)


def give_up_privileges(config: dict[str, Any]) -> None:
    """The last step of entering: limits, few capabilities, no new privileges, fewer system calls."""
    set_rlimits(config)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.refuse_dangerous_calls()


def mask_proc() -> None:
    """Hide what /proc tells of the host and could change there."""
    for name in _MASKED:
        if os.path.exists(f"/proc/{name}"):
            kernel.bind("/dev/null", f"/proc/{name}")
    for name in _EMPTY:
        if os.path.isdir(f"/proc/{name}"):
            kernel.mount("tmpfs", f"/proc/{name}", "tmpfs", kernel.MS_RDONLY, "size=0")
    for name in _READ_ONLY:
        if os.path.isdir(f"/proc/{name}"):
            kernel.bind(f"/proc/{name}", f"/proc/{name}")
            kernel.restrict_mount(f"/proc/{name}", kernel.ATTR_RDONLY)
