"""Process 1 of a sandbox: a small loop that holds the shell, reaps orphans and answers the node.

It owns the control socket; when the node goes away the socket ends, and so do this process and, with its namespace,
everything else. Long file work happens in forked children that stream through a pipe which the node handed over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from . import archive, files, kernel, processes
from .files import Conflict
from .shell import Shell
from .wire import Connection, Frame

REPORT = 1 << 15


class Init:
    """The loop and the requests it understands. One instance, one sandbox, one thread."""

    def __init__(self, sock: socket.socket, config: dict[str, Any], oom_counter: int | None) -> None:
        self.connection = Connection(sock)
        self.poller = select.poll()
        self.shell = Shell(config, self.poller, oom_counter)
        self.jobs: dict[int, tuple[int, int]] = {}
        self.shell.helpers = self.jobs.keys()
        self.frozen: set[int] = set()
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.poller.register(self._wake, select.POLLIN)
        self.operations: dict[str, Callable[[int, dict[str, Any], bytes], None]] = {
            "begin": self._begin,
            "exec": self._exec,
            "poll": self._poll,
            "interrupt": self._interrupt,
            "input": self._input,
            "kill": self._kill,
            "stat": lambda n, h, _p: self._reply(n, {"info": files.status(h["path"])}),
            "list": lambda n, h, _p: self._reply(n, {"entries": files.list_dir(h["path"], h["depth"])}),
            "remove": self._remove,
            "read": self._read,
            "write": self._write,
            "pack": self._pack,
            "unpack": self._unpack,
            "freeze": self._freeze,
            "thaw": self._thaw,
        }

    def run(self) -> None:
        """Serve until the node hangs up."""
        while True:
            events = select.POLLIN | (select.POLLOUT if self.connection.pending else 0)
            self.poller.register(self.connection.fileno(), events)
            wait = self.shell.next_event()
            ready = dict(self.poller.poll(None if wait is None else wait * 1000 + 1))
            for fd in [fd for fd in ready if fd in self.shell.readers]:
                if fd in self.shell.readers:
                    self.shell.readers[fd]()
            if self._wake in ready:
                self._reap()
            if self.connection.fileno() in ready:
                for frame in self.connection.receive():
                    self._dispatch(frame)
            self.shell.tick()
            self.connection.flush()

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

    def _dispatch(self, frame: Frame) -> None:
        number, header = frame.header["id"], frame.header
        try:
            self.operations[header["op"]](number, header, frame.payload)
        except OSError as error:
            self._fail(number, error)

    def _reply(self, number: int, header: dict[str, Any], payload: bytes = b"") -> None:
        self.connection.queue({"id": number, **header}, payload)

    def _refuse(self, number: int, code: str, message: str) -> None:
        self._reply(number, {"error": {"code": code, "message": message}})

    def _fail(self, number: int, error: OSError) -> None:
        self._reply(number, {"error": describe_error(error)})

    def _begin(self, number: int, header: dict[str, Any], _payload: bytes) -> None:
        """The first request: the launcher is our parent now, so its death can be ours."""
        kernel.hide_and_die_with(signal.SIGKILL)
        self.shell.environment = header["env"]
        self.shell.spawn()
        self._reply(number, {})

    def _exec(self, number: int, header: dict[str, Any], payload: bytes) -> None:
        if self.shell.running is not None:
            self._refuse(number, "busy", "an earlier command is still running; poll or interrupt it first")
            return
        try:
            self.shell.start(header, payload, partial(self._reply, number))
        except OSError as error:
            self._refuse(number, "broken", f"the sandbox cannot start a command: {error}")

    def _poll(self, number: int, header: dict[str, Any], _payload: bytes) -> None:
        if not self.shell.poll(header["soft_timeout"], partial(self._reply, number)):
            self._refuse(number, "idle", "no command is running")

    def _interrupt(self, number: int, _header: dict[str, Any], _payload: bytes) -> None:
        if not self.shell.interrupt(partial(self._reply, number)):
            self._refuse(number, "idle", "no command is running")

    def _input(self, number: int, header: dict[str, Any], payload: bytes) -> None:
        if wrong := self.shell.type(payload, header["soft_timeout"], partial(self._reply, number)):
            self._refuse(number, "idle", wrong)

    def _kill(self, number: int, _header: dict[str, Any], _payload: bytes) -> None:
        self.shell.kill()
        self._reply(number, {})

    def _remove(self, number: int, header: dict[str, Any], _payload: bytes) -> None:
        files.remove(header["path"])
        self._reply(number, {})

    def _read(self, number: int, header: dict[str, Any], _payload: bytes) -> None:
        path, offset, max_bytes = header["path"], header["offset"], header["max_bytes"]
        if header["streamed"]:
            out = self.connection.take_fd()
            self._start_job(
                number, out, lambda: files.read_into(path, offset, max_bytes, partial(files.write_all, out))
            )
        elif files.is_small(path, max_bytes):
            data = bytearray()
            wanted = files.INLINE if max_bytes is None else min(max_bytes, files.INLINE)
            files.read_into(path, offset, wanted + 1 if max_bytes is None else wanted, data.extend)
            large = len(data) > files.INLINE
            self._reply(number, {"large": large}, b"" if large else bytes(data))
        else:
            files.check_regular(path)
            self._reply(number, {"large": True})

    def _write(self, number: int, header: dict[str, Any], payload: bytes) -> None:
        path, size = header["path"], header["expected_bytes"]

        def write(data: bytes) -> None:
            if size is None:
                files.write_file(path, data, None)
            else:
                files.write_file(path, data[size:], data[:size])

        if header["streamed"]:
            source = self.connection.take_fd()

            def from_stream() -> None:
                with os.fdopen(source, "rb", closefd=False) as stream:
                    data = stream.read()
                if len(data) != header["size"]:
                    raise OSError(errno.EIO, "the data ended early", path)
                write(data)

            self._start_job(number, source, from_stream)
        else:
            write(payload)
            self._reply(number, {})

    def _pack(self, number: int, header: dict[str, Any], _payload: bytes) -> None:
        path, out = files.checked(header["path"]), self.connection.take_fd()

        def pack() -> None:
            with os.fdopen(out, "wb", closefd=False) as stream:
                archive.pack(path, header["exclude"], stream)

        self._start_job(number, out, pack)

    def _unpack(self, number: int, header: dict[str, Any], _payload: bytes) -> None:
        path, source = files.checked(header["path"]), self.connection.take_fd()

        def unpack() -> None:
            with os.fdopen(source, "rb", closefd=False) as stream:
                archive.unpack(path, stream)

        self._start_job(number, source, unpack)

    def _start_job(self, number: int, stream: int, work: Callable[[], None]) -> None:
        """Run `work` in a child; the reply follows when it ends. The stream is closed on this side."""
        reader, writer = os.pipe()
        try:
            pid = os.fork()
            if not pid:
                _work_and_exit(work, writer)
        finally:
            os.close(writer)
            os.close(stream)
        self.jobs[pid] = (number, reader)

    def _job_ended(self, number: int, reader: int) -> None:
        report = os.read(reader, REPORT)
        os.close(reader)
        killed = {"error": {"code": "lost", "message": "the file operation was killed"}}
        self._reply(number, json.loads(report) if report else killed)

    def _freeze(self, number: int, _header: dict[str, Any], _payload: bytes) -> None:
        """Stop everything inside (for as long as a copy of the files takes)."""
        me, deadline = os.getpid(), time.monotonic() + 2.0
        while time.monotonic() < deadline:
            table = processes.scan()
            moving = {pid for pid in processes.descendants(me, table) if table[pid].state not in "Tt"}
            if not moving:
                break
            processes.send(moving, signal.SIGSTOP)
            self.frozen |= moving
            time.sleep(0.001)
        self._reply(number, {})

    def _thaw(self, number: int, _header: dict[str, Any], _payload: bytes) -> None:
        processes.send(self.frozen, signal.SIGCONT)
        self.frozen.clear()
        self._reply(number, {})


def describe_error(error: OSError) -> dict[str, Any]:
    """An OSError as the wire's error object."""
    code = "conflict" if isinstance(error, Conflict) else "path"
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


def main(sock: socket.socket, config: dict[str, Any], oom_counter: int | None) -> NoReturn:
    """Be the sandbox's init until the node hangs up, then end with everything that runs inside."""
    try:
        with contextlib.suppress(EOFError, ConnectionError):
            Init(sock, config, oom_counter).run()
        processes.kill_all()
    finally:
        os._exit(0)
