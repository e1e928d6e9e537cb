"""What the launcher's forked children do: become a sandbox, or remove and copy trees."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any, NoReturn

from . import contain, enter, init, join, kernel
from .wire import Connection


def become_sandbox(request: dict[str, Any], control: int, lifeline: int, report: int) -> NoReturn:
    """In a fresh child of the launcher; process 1 or the child itself turns into the init, the other one leaves."""
    sock, line = socket.socket(fileno=os.dup(control)), socket.socket(fileno=os.dup(lifeline))
    try:
        signal.set_wakeup_fd(-1)
        anchor = [request["anchor"]] if "anchor" in request else []
        kernel.close_all_but(sock.fileno(), line.fileno(), report, *anchor)
        os.umask(0)
        sys.path.clear()  # an import from now on would run what an image has in that place
        try:
            if request["isolated"]:
                begin = join.start if anchor else contain.start if "container" in request else enter.start
                begin(request, report, lambda counter: _run_init(sock, line, request, counter))
            else:
                _start_plain(request, sock, line)
        except OSError as error:
            connection = Connection(sock)
            connection.queue({"id": 0, "error": str(error)})
            connection.flush()
    finally:
        os._exit(1)


def _start_plain(request: dict[str, Any], sock: socket.socket, line: socket.socket) -> NoReturn:
    """The same init without any isolation; orphans are handed to it because it is a subreaper."""
    counter = enter.join_group(request)
    enter.set_affinity(request)
    enter.set_rlimits(request)
    os.setsid()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    _run_init(sock, line, request, counter)


def _run_init(sock: socket.socket, line: socket.socket, request: dict[str, Any], counter: int | None) -> NoReturn:
    os.chdir("/")
    os.umask(0o022)
    kernel.rename_process("skyenv-init")
    init.main(sock, line, request, counter)


def prepare_directories(request: dict[str, Any]) -> None:
    """Make the sandbox's own directories; the top one belongs to the sandbox's root user.

    A container that is joined has its files elsewhere; its empty directory tells that there is something to clean up.
    """
    top = f"{request['state']}/{request['name']}"
    if "target" in request:
        os.makedirs(top)
        return
    if request["disk_bytes"] is not None:
        os.makedirs(top)
        kernel.mount("tmpfs", top, "tmpfs", kernel.MS_NODEV, f"mode=700,size={request['disk_bytes']}")
    for name in ("upper", "work", "root"):
        os.makedirs(f"{top}/{name}", exist_ok=True)
    if request["base_uid"] is not None:
        os.chown(f"{top}/upper", request["base_uid"], request["base_uid"])
    os.chmod(f"{top}/upper", 0o755)
    if request["lower"]:
        found = os.stat(request["lower"][0])
        os.chmod(f"{top}/upper", found.st_mode & 0o7777)


def remove_tree(path: str) -> None:
    """Remove a tree of any depth and whatever its modes; symlinks are not followed. Missing is fine."""
    if _run("rm", "-rf", "--", path, quiet=True):
        _run("chmod", "-R", "u+rwx", "--", path)
        if _run("rm", "-rf", "--", path):
            raise OSError(f"rm -rf {path} failed")


def copy_tree(source: str, target: str) -> None:
    """Copy a tree with everything that an overlay needs: whiteouts, extended attributes, hard links, times."""
    if os.path.isdir(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        status = _run("cp", "-a", "--reflink=auto", "-T", "--", source, target)
        if status:
            raise OSError(f"cp -a {source} {target} ended with status {status}")


def _run(*command: str, quiet: bool = False) -> int:
    silence = [(os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)] if quiet else []
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=silence)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
