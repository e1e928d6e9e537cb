"""The launcher: one process per node server that forks every sandbox, buries it and cleans up after it.

Started as a script in a session of its own, so that Ctrl-C in the node's terminal does not reach it. It owns the
state directory and the control groups. When the node goes away, however that happens, its socket ends: the launcher
then kills what is left, removes everything and ends too.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from . import enter, init, kernel, processes
from .cgroups import RECORD, Group, Hierarchy
from .wire import Connection, Frame

RETRY_MS = 20


class Launcher:
    """The loop. `config` holds what all sandboxes share; a create request adds what is its own."""

    def __init__(self, sock: socket.socket, config: dict[str, Any]) -> None:
        self.connection = Connection(sock)
        self.config = config
        self.state: str = config["state"]
        self.starting: dict[int, tuple[str, int, int]] = {}
        self.removers: set[int] = set()
        self.running: dict[int, str] = {}
        self.doomed: set[str] = set()
        self.ended: dict[str, list[int]] = {}
        self.burials: dict[str, Group] = {}
        self.copies: dict[int, tuple[int, int]] = {}
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.poller = select.poll()
        self.poller.register(self._wake, select.POLLIN)
        self.operations: dict[str, Callable[[Frame], None]] = {
            "ping": lambda frame: self._reply(frame.header["id"]),
            "create": self._create,
            "destroy": self._destroy,
            "copy": lambda frame: self._child(frame, lambda: _copy(frame.header["source"], frame.header["target"])),
            "remove": lambda frame: self._child(frame, lambda: remove_tree(frame.header["path"])),
        }

    def run(self) -> None:
        """Serve until the node hangs up, then bury everything."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._once()
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        self.doomed.update(name for name, _reader, _number in self.starting.values())
        self.connection.close()
        while self.starting or self.running or self.burials:
            self.poller.poll(RETRY_MS)
            self._reap()
            self._bury()
        for pid in self.copies:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        remove_tree(self.state)

    def _once(self) -> None:
        events = select.POLLIN | (select.POLLOUT if self.connection.pending else 0)
        self.poller.register(self.connection.fileno(), events)
        ready = dict(self.poller.poll(RETRY_MS if self.burials else None))
        if self._wake in ready:
            self._reap()
        if self.connection.fileno() in ready:
            for frame in self.connection.receive():
                self.operations[frame.header["op"]](frame)
        self._bury()
        self.connection.flush()

    def _reply(self, number: int, header: dict[str, Any] | None = None) -> None:
        self.connection.queue({"id": number, **(header or {})})

    def _create(self, frame: Frame) -> None:
        request = {**self.config, **frame.header}
        name, number, control = request["name"], request["id"], self.connection.take_fd()
        reader, writer = os.pipe()
        try:
            prepare_directories(request)
            pid = os.fork()
            if not pid:
                _become_sandbox(request, control, writer)
        except OSError as error:
            os.close(reader)
            self._reply(number, {"error": str(error)})
            return
        finally:
            os.close(control)
            os.close(writer)
        if self.config["isolated"]:
            self.starting[pid] = (name, reader, number)
        else:
            os.close(reader)
            self.running[pid] = name
            self._reply(number)

    def _destroy(self, frame: Frame) -> None:
        name = frame.header["name"]
        pids = [pid for pid, known in self.running.items() if known == name]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        starting = any(known == name for known, _reader, _number in self.starting.values())
        if starting:
            self.doomed.add(name)
        if pids or starting or name in self.burials:
            self.ended.setdefault(name, []).append(frame.header["id"])
        else:
            self._reply(frame.header["id"])

    def _child(self, frame: Frame, work: Callable[[], None]) -> None:
        """Run slow work on files in a child and reply when it is done."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                work()
                os.write(writer, b"ok")
            except OSError as error:
                os.write(writer, str(error).encode()[:4096])
            finally:
                os._exit(0)
        os.close(writer)
        self.copies[pid] = (frame.header["id"], reader)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid in self.starting:
                    self._entered(*self.starting.pop(pid))
                elif pid in self.running:
                    self._died(self.running.pop(pid))
                elif pid in self.removers:
                    self.removers.remove(pid)
                elif pid in self.copies:
                    number, reader = self.copies.pop(pid)
                    answer = os.read(reader, 4096).decode(errors="replace")
                    os.close(reader)
                    self._reply(number, None if answer == "ok" else {"error": answer or "killed"})

    def _entered(self, name: str, reader: int, number: int) -> None:
        """The child that set a sandbox up is gone; its own child, if it got that far, is the sandbox's init."""
        text = os.read(reader, 64)
        os.close(reader)
        if not text:
            self._died(name)
            self._reply(number, {"error": "the sandbox could not be set up"})
            return
        self._reply(number)
        self.running[int(text)] = name
        if name in self.doomed:
            os.kill(int(text), signal.SIGKILL)

    def _died(self, name: str) -> None:
        """Nothing of the sandbox runs any more: remove what it leaves."""
        if not self.config["isolated"]:
            self._kill_orphans()
        self.doomed.discard(name)
        hierarchies = [Hierarchy(*entry) for entry in self.config["cgroups"]]
        self.burials[name] = Group(tuple((each, f"{each.parent}/{name}") for each in hierarchies))
        self._remove_later(f"{self.state}/{name}")

    def _kill_orphans(self) -> None:
        """Without a process namespace, what outlived its init was handed to this process."""
        mine = {*self.starting, *self.running, *self.copies, *self.removers}
        processes.kill_all(known=mine)

    def _remove_later(self, path: str) -> None:
        if not os.path.isdir(path):
            return
        trash = f"{path}.gone"
        with contextlib.suppress(OSError):
            kernel.unmount(path)
        os.rename(path, trash)
        pid = os.fork()
        if not pid:
            try:
                remove_tree(trash)
            finally:
                os._exit(0)
        self.removers.add(pid)

    def _bury(self) -> None:
        for name in [name for name, group in self.burials.items() if group.remove()]:
            del self.burials[name]
            for number in self.ended.pop(name, ()):
                self._reply(number)


def _become_sandbox(request: dict[str, Any], control: int, report: int) -> NoReturn:
    """In a fresh child of the launcher; process 1 or the child itself turns into the init, the other one leaves."""
    sock = socket.socket(fileno=os.dup(control))
    try:
        signal.set_wakeup_fd(-1)
        kernel.close_all_but(sock.fileno(), report)
        os.umask(0)
        try:
            if request["isolated"]:
                enter.start(request, report, lambda counter: _run_init(sock, request, counter))
            else:
                _start_plain(request, sock)
        except OSError as error:
            connection = Connection(sock)
            connection.queue({"id": 0, "error": str(error)})
            connection.flush()
    finally:
        os._exit(1)


def _start_plain(request: dict[str, Any], sock: socket.socket) -> NoReturn:
    """The same init without any isolation; orphans are handed to it because it is a subreaper."""
    counter = enter.join_group(request)
    enter.set_affinity(request)
    enter.set_rlimits(request)
    os.setsid()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    _run_init(sock, request, counter)


def _run_init(sock: socket.socket, request: dict[str, Any], counter: int | None) -> NoReturn:
    os.chdir("/")
    os.umask(0o022)
    kernel.rename_process("skyenv-init")
    init.main(sock, request, counter)


def prepare_directories(request: dict[str, Any]) -> None:
    """Make the sandbox's own directories; the top one belongs to the sandbox's root user."""
    top = f"{request['state']}/{request['name']}"
    if request["disk_bytes"] is not None:
        os.makedirs(top)
        kernel.mount("tmpfs", top, "tmpfs", kernel.MS_NODEV, f"mode=700,size={request['disk_bytes']}")
    for name in ("upper", "work", "root"):
        os.makedirs(f"{top}/{name}", exist_ok=True)
    if request["base_uid"] is not None:
        os.chown(f"{top}/upper", request["base_uid"], request["base_uid"])
    os.chmod(f"{top}/upper", 0o755)


def remove_tree(path: str) -> None:
    """Remove a tree of any depth and whatever its modes; symlinks are not followed. Missing is fine."""
    if _run("rm", "-rf", "--", path):
        _run("chmod", "-R", "u+rwx", "--", path)
        if _run("rm", "-rf", "--", path):
            raise OSError(f"rm -rf {path} failed")


def _run(*command: str) -> int:
    return os.spawnvp(os.P_WAIT, command[0], command)


def _copy(source: str, target: str) -> None:
    """Copy a tree with everything that an overlay needs: whiteouts, extended attributes, hard links, times."""
    if os.path.isdir(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        status = _run("cp", "-a", "--reflink=auto", "-T", "--", source, target)
        if status:
            raise OSError(f"cp -a {source} {target} ended with status {status}")


def become_user(uid: int | None) -> None:
    """Give up root for good; None stays who we are."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def main() -> None:
    """Entry point: argument 1 is the descriptor of the node's socket, standard input the shared configuration."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    config = json.load(sys.stdin)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.rename_process("skyenv-launcher")
    if config["base_uid"] is not None:
        kernel.leave_mount_namespace()
    become_user(config["run_as"])
    lock = os.open(f"{config['state']}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(f"{config['state']}/{RECORD}", "w") as file:
        json.dump([parent for _version, parent, _names in config["cgroups"]], file)
    gc.collect()
    gc.freeze()
    gc.disable()
    Launcher(sock, config).run()
