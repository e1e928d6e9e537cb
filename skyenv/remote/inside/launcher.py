"""The launcher: one process that forks every sandbox, buries it and cleans up after it.

Started as a script in a session of its own, so that Ctrl-C in the node's terminal does not reach it. It owns the
state directory, the control groups and, for each sandbox, a lifeline: a socket to its init which ends when the
launcher does and over which the init is handed a fresh connection to a node. When the node goes away, however that
happens, the launcher kills what is left, removes everything and ends too; with a `Doorstep` it first waits for another
node, while each sandbox lives as long as its lease.
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
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from . import children, join, kernel, processes
from .cgroups import RECORD, Group, Hierarchy
from .doorstep import Doorstep, objection
from .stacks import Snapshot, Stacks
from .wire import Connection, Frame
from .workers import Workers

RETRY_MS = 20
LEASE_MS = 200
# What an init is told over its lifeline. THAW and SHIFT are followed by the seconds for which it was frozen.
ATTACH, FREEZE, THAW, SHIFT = b"a", b"f", b"t", b"s"

Asker = tuple[Connection, int]


class Held:
    """A sandbox: its lifeline, the record that its node keeps with it, and who waits for what."""

    __slots__ = ("anchor", "doomed", "ended", "freezing", "frozen_at", "lifeline", "pid", "record", "starting")

    def __init__(self, lifeline: socket.socket, record: dict[str, Any]) -> None:
        self.lifeline = lifeline
        self.record = record
        self.pid = 0
        self.anchor: int | None = None
        self.starting: tuple[int, Asker] | None = None
        self.doomed = False
        self.frozen_at: float | None = None
        self.freezing: list[Asker] = []
        self.ended: list[Asker] = []


class Launcher:
    """The loop. `config` holds what all sandboxes share; a create request adds what is its own."""

    def __init__(self, sock: socket.socket, config: dict[str, Any]) -> None:
        self.node: Connection | None = Connection(sock)
        self.config = config
        self.state: str = config["state"]
        self.hierarchies = [Hierarchy(*entry) for entry in config["cgroups"]]
        self.held: dict[str, Held] = {}
        self.pids: dict[int, str] = {}
        self.burials: dict[str, tuple[Group, list[Asker]]] = {}
        self.kept: dict[str, Any] = {}
        self.heirs: list[Connection] = []
        self.ending = False
        self.workers = Workers()
        self.stacks = Stacks(config, self.workers.start, self.workers.remove_later)
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.poller = select.poll()
        self.poller.register(self._wake, select.POLLIN)
        self.doorstep: Doorstep | None = None
        if config["doorstep"] is not None:
            self.doorstep = Doorstep(config["doorstep"], config["patience"], self.poller)
        self.operations: dict[str, Callable[[Asker, dict[str, Any]], None]] = {
            "ping": lambda asker, _header: self._reply(asker),
            "create": self._create,
            "attach": self._attach,
            "note": self._note,
            "keep": self._keep,
            "end": self._end,
            "freeze": self._freeze,
            "stats": self._stats,
            "destroy": self._destroy,
            "snapshot": self._snapshot,
            "snapshots": lambda asker, _header: self._reply(asker, {"snapshots": list(self.stacks.states)}),
            "state": lambda asker, h: self._reply(asker, payload=self.stacks.states.get(h["snapshot"], b"")),
            "forget": self._forget,
            "copy": lambda asker, h: self._work(asker, lambda: children.copy_tree(h["source"], h["target"])),
            "remove": lambda asker, h: self._work(asker, lambda: children.remove_tree(h["path"])),
        }

    def run(self) -> None:
        """Serve until no node is there and none can come, then bury everything."""
        while not self.ending and (self.node is not None or self._may_come()):
            self._once()
        if self.doorstep is not None:
            self.doorstep.close()
        for held in self.held.values():
            self._kill(held)
        while self.held or self.burials:
            self.poller.poll(RETRY_MS)
            self._reap()
            self._bury()
        self.workers.kill()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        children.remove_tree(self.state)

    def _may_come(self) -> bool:
        return self.doorstep is not None and not self.doorstep.expired

    def _once(self) -> None:
        ready = self._wait()
        if self._wake in ready:
            self._reap()
        if self.node is not None and self.node.fileno() in ready:
            self._serve(self.node)
        for held in [held for held in self.held.values() if held.freezing and held.lifeline.fileno() in ready]:
            self._froze(held)
        if self.doorstep is not None:
            self._open_door(self.doorstep, ready)
        self._bury()
        if self.node is not None:
            with contextlib.suppress(OSError):  # the end of its socket tells the rest
                self.node.flush()

    def _wait(self) -> dict[int, int]:
        if self.node is not None:
            events = select.POLLIN | (select.POLLOUT if self.node.pending else 0)
            self.poller.register(self.node.fileno(), events)
        patience = LEASE_MS if self.node is None else None
        return dict(self.poller.poll(RETRY_MS if self.burials or self.heirs else patience))

    def _serve(self, node: Connection) -> None:
        try:
            for frame in node.receive():
                self._handle((node, frame.header["id"]), frame)
        except EOFError:
            self.poller.unregister(node.fileno())
            node.close()
            self.node = None
            if self.doorstep is not None:
                self.doorstep.left_at = time.monotonic()

    def _open_door(self, doorstep: Doorstep, ready: dict[int, int]) -> None:
        """Let a node in once no sandbox is half made, unless one is there; without any, watch over the leases."""
        for guest, wish in doorstep.wishes(ready):
            refused = "another server uses it" if self.node or self.heirs else objection(wish, self.config)
            if refused:
                guest.queue({"id": 0, "error": refused})
                guest.flush()
                guest.close()
            else:
                self.heirs.append(guest)
        if self.heirs and not any(held.starting for held in self.held.values()):
            self.node = self.heirs.pop()
            living = [[name, held.record] for name, held in self.held.items() if not held.doomed]
            self.node.queue({"id": 1, "held": living, "kept": self.kept, "config": self.config})
        elif self.node is None:
            now = time.monotonic()
            for held in self.held.values():
                if not held.doomed and held.record.get("expires", now) < now:
                    self._kill(held)

    def _handle(self, asker: Asker, frame: Frame) -> None:
        try:
            self.operations[frame.header["op"]](asker, frame.header | {"payload": frame.payload})
        except OSError as error:
            self._reply(asker, {"error": str(error)})

    def _reply(self, asker: Asker, header: dict[str, Any] | None = None, payload: bytes = b"") -> None:
        """Answer whoever asked; a node that is gone is not told."""
        connection, number = asker
        if connection is self.node:
            connection.queue({"id": number, **(header or {})}, payload)

    def _create(self, asker: Asker, header: dict[str, Any]) -> None:
        request, control = {**self.config, **header}, asker[0].take_fd()
        reader, writer = os.pipe()
        lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline.setblocking(False)
        held = Held(lifeline, header["record"])
        try:
            request["lower"] = self.stacks.start(header["name"], header.get("snapshot"), header.get("lower", []))
            if "target" in request:
                request["anchor"] = held.anchor = join.anchor_of(request)
            children.prepare_directories(request)
            held.pid = os.fork()
            if not held.pid:
                children.become_sandbox(request, control, theirs.fileno(), writer)
        except OSError:
            os.close(reader)
            lifeline.close()
            self.stacks.release(header["name"])
            if held.anchor is not None:
                join.end(held.anchor)
            raise
        finally:
            theirs.close()
            os.close(control)
            os.close(writer)
        self.held[header["name"]], self.pids[held.pid] = held, header["name"]
        self._remember(header.get("keep", {}))
        if self.config["isolated"]:
            held.starting = (reader, asker)
        else:
            os.close(reader)
            self._reply(asker)

    def _find(self, header: dict[str, Any]) -> Held:
        """The sandbox that a request names. OSError when it does not live."""
        held = self.held.get(header["name"])
        if held is None or held.starting is not None:
            raise OSError("the sandbox is not alive")
        return held

    def _attach(self, asker: Asker, header: dict[str, Any]) -> None:
        """Hand the sandbox's init a new control socket, in place of the one it has."""
        control = asker[0].take_fd()
        try:
            socket.send_fds(self._find(header).lifeline, [ATTACH], [control])
        finally:
            os.close(control)
        self._reply(asker)

    def _note(self, asker: Asker, header: dict[str, Any]) -> None:
        self._find(header).record = header["record"]
        self._reply(asker)

    def _keep(self, asker: Asker, header: dict[str, Any]) -> None:
        """Remember something for the backend of the next node; None forgets it."""
        self._remember(header["keep"])
        self._reply(asker)

    def _remember(self, facts: dict[str, Any]) -> None:
        self.kept.update(facts)
        for key in [key for key, value in facts.items() if value is None]:
            del self.kept[key]

    def _end(self, _asker: Asker, _header: dict[str, Any]) -> None:
        """The node does not want to be followed by another. The answer is the end of this process."""
        self.ending = True

    def _stats(self, asker: Asker, header: dict[str, Any]) -> None:
        self._find(header)
        usage = Group.of(self.hierarchies, header["name"]).usage()
        if os.path.ismount(top := f"{self.state}/{header['name']}"):
            disk = os.statvfs(top)
            usage["disk_bytes"] = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        self._reply(asker, {"usage": usage})

    def _freeze(self, asker: Asker, header: dict[str, Any]) -> None:
        """Freeze or thaw, by the freezer if there is one, else through the init. `done` False: ask again."""
        held, wanted = self._find(header), header["frozen"]
        group = Group.of(self.hierarchies, header["name"])
        since, held.frozen_at = held.frozen_at, (held.frozen_at or time.monotonic()) if wanted else None
        seconds = b"%.3f" % (time.monotonic() - since) if since is not None else b"0"
        if group.freezer is not None:
            if since is not None and not wanted:
                held.lifeline.send(SHIFT + seconds)
            self._reply(asker, {"done": group.freeze(wanted)})
            return
        held.lifeline.send(FREEZE if wanted else THAW + seconds)
        self.poller.register(held.lifeline.fileno(), select.POLLIN)
        held.freezing.append(asker)

    def _froze(self, held: Held) -> None:
        """An init without freezer did as it was told, or could not."""
        word = b""
        with contextlib.suppress(OSError):
            word = held.lifeline.recv(16)
        self.poller.unregister(held.lifeline.fileno())
        for asker in held.freezing:
            self._reply(asker, {"done": word != b"n"})
        held.freezing.clear()

    def _destroy(self, asker: Asker, header: dict[str, Any]) -> None:
        name = header["name"]
        if name in self.held:
            self._kill(self.held[name])
            self.held[name].ended.append(asker)
        elif name in self.burials:
            self.burials[name][1].append(asker)
        else:
            self._reply(asker)

    def _kill(self, held: Held) -> None:
        """A sandbox that is still being set up is killed once its init is known."""
        held.doomed = True
        if held.starting is None:
            os.kill(held.pid, signal.SIGKILL)
        if held.frozen_at is not None:  # version 1 lets nothing frozen die
            Group.of(self.hierarchies, self.pids[held.pid]).freeze(False)

    def _snapshot(self, asker: Asker, header: dict[str, Any]) -> None:
        pid = self._find(header).pid
        wanted = Snapshot(header["snapshot"], header["name"], pid, header["idle"], header["payload"])
        self.stacks.take(wanted, header["lower"], partial(self._worked, asker))

    def _forget(self, asker: Asker, header: dict[str, Any]) -> None:
        if header["snapshot"] in self.stacks.states:
            self.stacks.release(header["snapshot"])
        self._reply(asker)

    def _work(self, asker: Asker, work: Callable[[], None]) -> None:
        """Run slow work on files in a child and reply when it is done."""
        self.workers.start(work, partial(self._worked, asker))

    def _worked(self, asker: Asker, answer: str) -> None:
        self._reply(asker, None if answer == "ok" else {"error": answer})

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid in self.pids:
                    self._left(self.pids.pop(pid))
                else:
                    self.workers.reaped(pid)

    def _left(self, name: str) -> None:
        """The child that set a sandbox up is gone, and its own child is the init now; or the init is gone."""
        held = self.held[name]
        if held.starting is None:
            self._died(name)
            return
        (reader, asker), held.starting = held.starting, None
        container, _space, pid = os.read(reader, 64).decode().rpartition(" ")
        os.close(reader)
        if container:
            with contextlib.suppress(OSError):
                held.anchor = join.anchor_of({"target": int(container), "sign": name})
        if not pid:
            self._died(name)
            self._reply(asker, {"error": "the sandbox could not be set up"})
            return
        held.pid = int(pid)
        self.pids[held.pid] = name
        if held.doomed:
            os.kill(held.pid, signal.SIGKILL)
        self._reply(asker)

    def _died(self, name: str) -> None:
        """Nothing of the sandbox runs any more: remove what it leaves."""
        if not self.config["isolated"]:
            self._kill_orphans()
        held = self.held.pop(name)
        for asker in held.freezing:
            self._reply(asker, {"error": "the sandbox is not alive"})
        if held.freezing:
            self.poller.unregister(held.lifeline.fileno())
        held.lifeline.close()
        if held.anchor is not None:
            join.end(held.anchor)
        self.burials[name] = (Group.of(self.hierarchies, name), held.ended)
        self.workers.remove_later(f"{self.state}/{name}")
        self.stacks.release(name)

    def _kill_orphans(self) -> None:
        """Without a process namespace, what outlived its init was handed to this process."""
        processes.kill_all(known={*self.pids, *self.workers.pids})

    def _bury(self) -> None:
        for name in [name for name, (group, _askers) in self.burials.items() if group.remove()]:
            _group, askers = self.burials.pop(name)
            for asker in askers:
                self._reply(asker)


def main() -> None:
    """Entry point: argument 1 is the descriptor of the node's socket, standard input the shared configuration."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    config = json.load(sys.stdin)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.rename_process("skyenv-launcher")
    if config["base_uid"] is not None:
        kernel.leave_mount_namespace()
    if config["doorstep"] is not None:
        os.chmod(config["doorstep"], 0o700)
    kernel.become_user(config["run_as"])
    lock = os.open(f"{config['state']}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(f"{config['state']}/{RECORD}", "w") as file:
        json.dump(config["cgroups"], file)
    gc.collect()
    gc.freeze()
    gc.disable()
    Launcher(sock, config).run()
