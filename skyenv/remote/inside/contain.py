"""From a forked child to a container of its own by an OCI runtime, and then beside that container's first process.

The overlay is mounted in a mount namespace that only this child and the container ever have, so nothing is left to
unmount. The runtime sees the machine's control groups as version 1 or 2, never as both (crun refuses that), and puts
the container's sleeping first process wherever it does; what runs in a sandbox is in the launcher's groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from . import enter, join, kernel
from .processes import send

PID_FILE = "container"
START_TIMEOUT = 20.0
_PLACES = ("/mnt", "/media", "/srv", "/opt", "/home", "/var/tmp")
_HYBRID = "/sys/fs/cgroup/unified"
_WORDS = 1000


def start(config: dict[str, Any], report: int, become_init: Callable[[int | None], NoReturn]) -> None:
    """As `join.start`, for a container that is not there yet.

    Its first process is reported before the init; from then on it is the launcher's to end.
    """
    top = f"{config['state']}/{config['name']}"
    if config["base_uid"] is None:
        enter.map_single_user()
    kernel.leave_mount_namespace()
    _hide_hybrid_groups()
    stage = _stage(config)
    enter.mount_root({**config, "root": f"{stage}/root"})
    kernel.bind(config["sysfs"], f"{stage}/sys")
    _write_bundle(config, top, stage)
    _run(config, top)
    joined = {**config, "sign": config["name"], "target": first_process(top)}
    joined["anchor"] = join.anchor_of(joined)
    os.write(report, f"{joined['target']} ".encode())
    join.start(joined, report, become_init)


def first_process(top: str) -> int:
    """The container's first process, as the runtime wrote it down. OSError when it did not."""
    with open(f"{top}/{PID_FILE}") as file:
        text = file.read().strip()
    if not text.isdigit():
        raise ProcessLookupError(3, "the runtime did not tell the container's process")
    return int(text)


def end_left(top: str) -> None:
    """Kill the container of a sandbox whose launcher could not."""
    with contextlib.suppress(OSError):
        join.end(join.anchor_of({"target": first_process(top), "sign": os.path.basename(top)}))


def _hide_hybrid_groups() -> None:
    if os.path.ismount(_HYBRID):
        kernel.mount("tmpfs", _HYBRID, "tmpfs", kernel.MS_RDONLY, "size=0")


def _stage(config: dict[str, Any]) -> str:
    """A place for mounts that only this mount namespace sees, and that the sandbox's users can walk to.

    The runtime walks there as the sandbox's root, who may not enter the state directory.
    """
    for place in _PLACES:
        needed = any(path.startswith(place + "/") for path in (config["state"], config["runtime"][0], *config["lower"]))
        if not needed and os.path.isdir(place) and not os.path.islink(place):
            enter.mount_tmpfs(place, config["base_uid"] or 0, 0o711, 65536)
            for name in ("root", "sys"):
                os.mkdir(f"{place}/{name}")
            return place
    raise OSError(f"one of {', '.join(_PLACES)} must be a directory, to mount things on")


def _write_bundle(config: dict[str, Any], top: str, stage: str) -> None:
    bundle = config["container"]
    bundle["root"] = {"path": f"{stage}/root", "readonly": False}
    for mount in bundle["mounts"]:
        if mount["destination"] == "/sys":
            mount["source"] = f"{stage}/sys"
    with open(f"{top}/config.json", "w") as file:
        json.dump(bundle, file)


def _run(config: dict[str, Any], top: str) -> None:
    """Run the runtime until the container's first process sleeps. OSError with what it said when that fails."""
    log = f"{top}/log"
    program, *options = config["runtime"]
    command = [program, *options, "--root", f"{top}/runtime", "run", "--detach", "--bundle", top]
    command += ["--pid-file", f"{top}/{PID_FILE}", config["name"]]
    pid = os.fork()
    if not pid:
        try:
            null = os.open("/dev/null", os.O_RDWR)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for source, target in ((null, 0), (out, 1), (out, 2)):
                os.dup2(source, target)
            kernel.close_all_but()
            os.setsid()
            os.umask(0o022)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.execve(program, command, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XDG_RUNTIME_DIR": top})
        finally:
            os._exit(127)
    status = _wait(pid)
    if status:
        with open(log, errors="replace") as file:
            said = file.read()[-_WORDS:].strip()
        how = "did not end in time" if status is None else f"ended with status {status}"
        raise OSError(f"{program} {how}: {said}")


def _wait(pid: int) -> int | None:
    """A child's exit status; None when it had to be killed because it took too long."""
    ended = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(ended, select.POLLIN)
        in_time = bool(poller.poll(START_TIMEOUT * 1000))
    finally:
        os.close(ended)
    if not in_time:
        send({pid}, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if in_time else None
