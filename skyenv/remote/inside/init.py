"""Process 1 of a sandbox: a small loop that holds the shell, reaps orphans and answers the node.

It lives as long as its lifeline, a socket to the launcher, and beside a container that somebody else made as long as
the first process of that (the `anchor`); then it ends and, with its namespace, everything else. The control socket to a
node may end before: what runs goes on, its answer is kept under its key, and the next control socket comes over the
lifeline. Long file work happens in forked children that stream through a pipe which the node handed over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn

from . import archive, files, kernel, processes, state
from .calls import Calls
from .command import Reply
from .files import Conflict, Cut
from .shell import Shell
from .tunnel import Tunnels
from .wire import Connection, Frame

REPORT = 1 << 15
STOP_WITHIN = 5.0


class Init:
    """The loop and the requests it understands. One instance, one sandbox, one thread."""

    def __init__(
        self, control: socket.socket, lifeline: socket.socket, config: dict[str, Any], oom_counter: int | None
    ) -> None:
        self.control: Connection | None = Connection(control)
        self.lifeline = lifeline
        self.calls = Calls()
        self.poller = select.poll()
        self.shell = Shell(config, self.poller, oom_counter)
        self.jobs: dict[int, tuple[Reply, int]] = {}
        self.shell.helpers = self.jobs.keys()
        self.tunnels = Tunnels(self.poller, self.shell.readers)
        self.guests: Collection[int] = config.get("guests", ())
        self.shell.guests = self.guests
        self.frozen: set[int] = set()
        self.streams: list[int] = []
        self.begun = False
        self.private_root: bool = config["isolated"]
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        lifeline.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.poller.register(self._wake, select.POLLIN)
        self.poller.register(lifeline, select.POLLIN)
        self.anchor: int = config.get("anchor", lifeline.fileno())
        self.poller.register(self.anchor, select.POLLIN)
        self.operations: dict[str, Callable[[Reply, dict[str, Any], bytes], None]] = {
            "begin": self._begin,
            "status": self._status,
            "save_state": self._save_state,
            "settle": self._settle,
            "follow": self._follow,
            "exec": self._exec,
            "poll": self._poll,
            "interrupt": self._interrupt,
            "input": self._input,
            "kill": self._kill,
            "stat": lambda reply, h, _p: reply({"info": files.status(h["path"])}, b""),
            "list": lambda reply, h, _p: reply({"entries": files.list_dir(h["path"], h["depth"])}, b""),
            "remove": self._remove,
            "read": self._read,
            "write": self._write,
            "pack": self._pack,
            "unpack": self._unpack,
            "listen": lambda reply, h, _p: reply({"port": self.tunnels.listen(h["port"])}, b""),
            "accept": self._accept,
        }

    def run(self) -> None:
        """Serve until the lifeline ends."""
        while True:
            control = self.control
            if control is not None:
                events = select.POLLIN | (select.POLLOUT if control.pending else 0)
                self.poller.register(control.fileno(), events)
            wait = self.shell.next_event()
            ready = dict(self.poller.poll(None if wait is None else wait * 1000 + 1))
            for fd in [fd for fd in ready if fd in self.shell.readers]:
                if fd in self.shell.readers:
                    self.shell.readers[fd]()
            if self._wake in ready:
                self._reap()
            if control is not None and control.fileno() in ready:
                self._serve(control)
            if self.lifeline.fileno() in ready:
                self._listen()
            elif self.anchor in ready:
                raise EOFError
            self.shell.tick()
            if self.control is not None:
                with contextlib.suppress(OSError):  # the end of the socket tells the rest
                    self.control.flush()

    def _serve(self, control: Connection) -> None:
        try:
            for frame in control.receive():
                self._dispatch(control, frame)
        except EOFError:
            self._hang_up()

    def _hang_up(self) -> None:
        if self.control is not None:
            self.poller.unregister(self.control.fileno())
            self.control.close()
            self.control = None
            self.tunnels.forget()

    def _listen(self) -> None:
        """What the launcher says over the lifeline. EOFError when it has ended."""
        word, fds, _flags, _address = socket.recv_fds(self.lifeline, 16, 1)
        if not word:
            raise EOFError
        if fds:
            self._hang_up()
            self.control = Connection(socket.socket(fileno=fds[0]))
        elif word == b"f":
            told, all_stopped = processes.stop_all(self.guests, STOP_WITHIN)
            self.frozen |= told
            self.shell.held = True
            self.lifeline.send(word if all_stopped else b"n")
        else:  # it was frozen for so many seconds
            self.shell.shift(float(word[1:]))
            if word.startswith(b"t"):
                processes.send(self.frozen, signal.SIGCONT)
                self.frozen.clear()
                self.shell.held = False
                self.lifeline.send(b"t")

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid == self.shell.pid:
                    self.shell.died(status)
                elif pid in self.jobs:
                    self._job_ended(*self.jobs.pop(pid))
                else:
                    self.shell.reaped(pid, status)

    def _dispatch(self, control: Connection, frame: Frame) -> None:
        """Run a request, unless its key says that it has run or is running."""
        header = frame.header
        reply: Reply = partial(self._reply, control, header["id"])
        self.streams = [control.take_fd() for _number in range(header.get("fds", 0))]
        for key in header.get("acks", ()):
            self.calls.drop(key)
        try:
            key = header.get("key")
            if key is not None:
                if not self.calls.start(key, reply):
                    return
                reply = partial(self.calls.finish, key)
            self.operations[header["op"]](reply, header, frame.payload)
        except OSError as error:
            reply({"error": describe_error(error)}, b"")
        finally:
            while self.streams:
                os.close(self.streams.pop())

    def _reply(self, control: Connection, number: int, header: dict[str, Any], payload: bytes) -> None:
        """Answer whoever asked; a node that is gone is not told."""
        if control is self.control:
            control.queue({"id": number, **header}, payload)

    def _begin(self, reply: Reply, header: dict[str, Any], payload: bytes) -> None:
        """The first request: the launcher is our parent now, so its death can be ours. Idempotent.

        A payload is the state of another session that this one takes over.
        """
        if not self.begun:
            kernel.hide_and_die_with(signal.SIGKILL)
            self.shell.environment = header["env"]
            if payload:
                state.restore(self.shell, payload, header["overrides"])
            if self.shell.exists:
                self.shell.spawn()
            self.begun = True
        reply({}, b"")

    def _status(self, reply: Reply, _header: dict[str, Any], _payload: bytes) -> None:
        """Whether the sandbox was begun, and what moves in it: a command, other processes than its shell."""
        others = processes.descendants(os.getpid(), processes.scan()) - {self.shell.pid, *self.jobs, *self.guests}
        running = self.shell.running is not None or bool(self.jobs)
        reply({"begun": self.begun, "running": running, "processes": len(others)}, b"")

    def _save_state(self, reply: Reply, header: dict[str, Any], _payload: bytes) -> None:
        """What lives besides an idle shell and, if it is wanted, the state of that shell."""
        if header["shell"]:
            saved = state.save(self.shell, self.private_root)
        else:
            saved = state.Saved(b"", state.moving(self.shell), [])
        reply({"moving": saved.moving, "lost": saved.lost}, saved.state)

    def _settle(self, reply: Reply, _header: dict[str, Any], _payload: bytes) -> None:
        """The root was exchanged: let the shell go on in the new one."""
        state.settle(self.shell)
        reply({}, b"")

    def _follow(self, reply: Reply, header: dict[str, Any], _payload: bytes) -> None:
        """Wait for a call that was made before."""
        if not self.calls.follow(header["call"], reply):
            _refuse(reply, "unknown", f"no call {header['call']!r} is known")

    def _exec(self, reply: Reply, header: dict[str, Any], payload: bytes) -> None:
        if self.shell.running is not None:
            _refuse(reply, "busy", "an earlier command is still running; poll or interrupt it first")
            return
        try:
            self.shell.start(header, payload, reply)
        except OSError as error:
            _refuse(reply, "broken", f"the sandbox cannot start a command: {error}")

    def _poll(self, reply: Reply, header: dict[str, Any], _payload: bytes) -> None:
        if not self.shell.poll(reply, header["soft_timeout"], header["flush"]):
            _refuse(reply, "idle", "no command is running")

    def _interrupt(self, reply: Reply, _header: dict[str, Any], _payload: bytes) -> None:
        if not self.shell.interrupt(reply):
            _refuse(reply, "idle", "no command is running")

    def _input(self, reply: Reply, header: dict[str, Any], payload: bytes) -> None:
        if wrong := self.shell.type(payload, reply, header["soft_timeout"], header["flush"]):
            _refuse(reply, "idle", wrong)

    def _kill(self, reply: Reply, _header: dict[str, Any], _payload: bytes) -> None:
        self.shell.kill()
        reply({}, b"")

    def _remove(self, reply: Reply, header: dict[str, Any], _payload: bytes) -> None:
        files.remove(header["path"])
        reply({}, b"")

    def _read(self, reply: Reply, header: dict[str, Any], _payload: bytes) -> None:
        path, offset, max_bytes = header["path"], header["offset"], header["max_bytes"]
        if header["streamed"]:
            out = self.streams.pop()
            self._start_job(reply, out, lambda: files.read_into(path, offset, max_bytes, partial(files.write_all, out)))
        elif files.is_small(path, max_bytes):
            data = bytearray()
            wanted = files.INLINE if max_bytes is None else min(max_bytes, files.INLINE)
            files.read_into(path, offset, wanted + 1 if max_bytes is None else wanted, data.extend)
            large = len(data) > files.INLINE
            reply({"large": large}, b"" if large else bytes(data))
        else:
            files.check_regular(path)
            reply({"large": True}, b"")

    def _write(self, reply: Reply, header: dict[str, Any], payload: bytes) -> None:
        path, size = header["path"], header["expected_bytes"]

        def write(data: bytes) -> None:
            if size is None:
                files.write_file(path, data, None)
            else:
                files.write_file(path, data[size:], data[:size])

        if header["streamed"]:
            source = self.streams.pop()

            def from_stream() -> None:
                with os.fdopen(source, "rb", closefd=False) as stream:
                    data = stream.read()
                if len(data) != header["size"]:
                    raise Cut(path)
                write(data)

            self._start_job(reply, source, from_stream)
        else:
            write(payload)
            reply({}, b"")

    def _pack(self, reply: Reply, header: dict[str, Any], _payload: bytes) -> None:
        path, out = files.checked(header["path"]), self.streams.pop()

        def pack() -> None:
            with os.fdopen(out, "wb", closefd=False) as stream:
                archive.pack(path, header["exclude"], stream)

        self._start_job(reply, out, pack)

    def _unpack(self, reply: Reply, header: dict[str, Any], _payload: bytes) -> None:
        path, source = files.checked(header["path"]), self.streams.pop()

        def unpack() -> None:
            with archive.Counted(source) as stream:
                try:
                    archive.unpack(path, stream)
                finally:
                    if stream.count < header["size"] and not stream.read(1):
                        raise Cut(path)

        self._start_job(reply, source, unpack)

    def _accept(self, reply: Reply, header: dict[str, Any], _payload: bytes) -> None:
        """Answer once somebody has connected to a tunnel's port."""
        sink, source = self.streams.pop(), self.streams.pop()
        self.tunnels.accept(header["port"], reply, source, sink)

    def _start_job(self, reply: Reply, stream: int, work: Callable[[], None]) -> None:
        """Run `work` in a child; the reply follows when it ends. The stream is closed on this side."""
        reader, writer = os.pipe()
        try:
            pid = os.fork()
            if not pid:
                kernel.close_all_but(stream, writer)
                _work_and_exit(work, writer)
        finally:
            os.close(writer)
            os.close(stream)
        self.jobs[pid] = (reply, reader)

    def _job_ended(self, reply: Reply, reader: int) -> None:
        report = os.read(reader, REPORT)
        os.close(reader)
        killed = {"error": {"code": "lost", "message": "the file operation was killed"}}
        reply(json.loads(report) if report else killed, b"")


def _refuse(reply: Reply, code: str, message: str) -> None:
    reply({"error": {"code": code, "message": message}}, b"")


def describe_error(error: OSError) -> dict[str, Any]:
    """An OSError as the wire's error object."""
    code = "cut" if isinstance(error, Cut) else "conflict" if isinstance(error, Conflict) else "path"
    message = error.strerror or str(error)
    named = f"{message}: {error.filename}" if error.filename else message
    return {"code": code, "message": named, "errno": error.errno or errno.EIO}


def _work_and_exit(work: Callable[[], None], report: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        try:
            work()
            answer: dict[str, Any] = {}
        except OSError as error:
            answer = {"error": describe_error(error)}
        os.write(report, json.dumps(answer).encode()[:REPORT])
    finally:
        os._exit(0)


def main(control: socket.socket, lifeline: socket.socket, config: dict[str, Any], oom_counter: int | None) -> NoReturn:
    """Be the sandbox's init until the lifeline ends, then end with everything that runs inside."""
    try:
        with contextlib.suppress(EOFError, ConnectionError):
            Init(control, lifeline, config, oom_counter).run()
        processes.kill_all()
    finally:
        os._exit(0)
