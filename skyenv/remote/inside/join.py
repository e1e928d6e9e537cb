"""From a forked child to process 1 beside a container that somebody else made (docker, crun, runc).

The container's own first process only sleeps; it keeps the namespaces. This child joins them, all but that of
processes: it makes a new one, so that the init is process 1 there, reaps every orphan and cannot be signalled by what
it runs. It shares the container's files, network and names, has mounts of its own beside them (/proc, the session's
directory), and needs nothing inside: no Python, no shell of the image takes part before privileges are given up.

Control groups are the launcher's as for every sandbox, so limits, statistics and freezing are the same everywhere.
When the container's first process ends, `Init` sees it on the descriptor `config["anchor"]` and ends too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from . import enter, kernel

_JOINED = {
    "mnt": kernel.NEWNS, "net": kernel.NEWNET, "ipc": kernel.NEWIPC, "uts": kernel.NEWUTS, "cgroup": kernel.NEWCGROUP,
}  # fmt: skip
_OWN = kernel.NEWNS | kernel.NEWPID | kernel.NEWCGROUP
_PROCESSORS = "/sys/devices/system/cpu"
_IPV6 = "/proc/sys/net/ipv6/conf"


def anchor_of(config: dict[str, Any]) -> int:
    """A descriptor of the container's first process, `config["target"]`. OSError when it is not the one meant.

    `config["sign"]` is text that only this container's mounts contain, such as its id.
    """
    pid = config["target"]
    anchor = os.pidfd_open(pid)
    try:
        with open(f"/proc/{pid}/mountinfo") as file:
            known = config["sign"] in file.read()
        if not known or _ended(anchor):
            raise ProcessLookupError(3, f"process {pid} is not the container's first one any more")
    except OSError:
        os.close(anchor)
        raise
    return anchor


def end(anchor: int) -> None:
    """Kill the container's first process, and so the container. The descriptor is closed."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(anchor, signal.SIGKILL)
    os.close(anchor)


def _ended(anchor: int) -> bool:
    poller = select.poll()
    poller.register(anchor, select.POLLIN)
    return bool(poller.poll(0))


def start(config: dict[str, Any], report: int, become_init: Callable[[int | None], NoReturn]) -> None:
    """As `enter.start`: in a fresh child, enter the container, fork its init, write its pid (of here) and leave."""
    anchor = config["anchor"]
    counter = enter.join_group(config)
    enter.set_affinity(config)
    users = _foreign_users(config["target"])
    foreign = sum(flag for kind, flag in _JOINED.items() if _is_foreign(config["target"], kind))
    if users is not None and os.geteuid():
        kernel.enter(anchor, kernel.NEWUSER | foreign)
        users = None
    else:
        kernel.enter(anchor, foreign)
    kernel.unshare(_OWN)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        if os.read(reader, 1):
            os.write(report, str(pid).encode())
        return
    os.close(reader)
    os.close(report)
    _mount_own(config)
    _become_root(users)
    enter.give_up_privileges(config)
    _check_shell(config["shells"], config.get("shell_check", "needed"))
    os.write(writer, b"1")
    os.close(writer)
    become_init(counter)


def _foreign_users(pid: int) -> int | None:
    """The container's user namespace, if it has one of its own."""
    if not _is_foreign(pid, "user"):
        return None
    return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def _is_foreign(pid: int, kind: str) -> bool:
    """Whether a process has another namespace of this kind; one's own may be one that nobody here may enter."""
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino


def _mount_own(config: dict[str, Any]) -> None:
    """Mounts that only the init and what it starts see. Nothing of an image runs yet; its links stay inside."""
    owner = config["base_uid"] or 0
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.restrict_mount("/", kernel.ATTR_NODEV, below=False)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    if config["network"] == "none":
        _raise_network()
    enter.mask_proc()
    for name in enter.DEVICES:
        # A mount point of this namespace cannot be removed, unlike the engine's device file.
        kernel.bind(f"/dev/{name}", f"/dev/{name}")
    if os.path.isdir(_PROCESSORS):
        enter.mount_tmpfs(_PROCESSORS, owner, 0o755, 65536)
        enter.tell_processors(_PROCESSORS)
        kernel.restrict_mount(_PROCESSORS, kernel.ATTR_RDONLY)
    os.makedirs(config["run_dir"], exist_ok=True)
    enter.mount_tmpfs(config["run_dir"], owner, 0o711, config["tmpfs_bytes"])


def _raise_network() -> None:
    """Loopback works, in both versions; engines switch the newer one off in containers without a network."""
    with contextlib.suppress(OSError):
        kernel.raise_loopback()
        for name in ("all", "default", "lo"):
            enter.write(f"{_IPV6}/{name}/disable_ipv6", "0")


def _become_root(users: int | None) -> None:
    """Be the container's root, whoever that is outside."""
    if users is not None:
        kernel.enter(users, kernel.NEWUSER)
        os.close(users)
    with contextlib.suppress(PermissionError):
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _check_shell(shells: list[str], check: str) -> None:
    """OSError unless the shell that the session will use can be started here.

    `check` is "needed", "optional" (there may be none, but one that is there must work) or "known" to work.
    """
    program = next((path for path in shells if os.access(path, os.X_OK)), "/bin/sh")
    if check == "known" or (check == "optional" and not os.access(program, os.X_OK)):
        return
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.execve(program, [program, "-c", ":"], {})
        except OSError as error:
            os.write(writer, (error.strerror or "").encode())
        finally:
            os._exit(126)
    os.close(writer)
    reason = os.read(reader, 200).decode()
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise OSError(f"the image's shell {program} cannot run: {reason or f'it ended with status {status}'}")
