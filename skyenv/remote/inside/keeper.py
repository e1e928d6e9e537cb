"""Process 1 of a container that nobody can enter: the init of a sandbox, and beside it a thread that keeps its line.

There is no launcher here, so the keeper does what one does. It holds the lifeline and hands a fresh control socket
over it to the init whenever a new node comes. A node comes over a held exec: `relay` connects standard input and
output of that program to the keeper's abstract socket, and a `Bridge` carries the init's protocol over them. The first
node brings the key that every later one must know. The stream may break and be replaced; when nobody has been
connected for `patience` seconds the keeper lets go of the lifeline and everything ends.

Beside the init's socket the bridge carries a second one, on which the keeper itself answers: environment, stats,
stop and go, capture and restore of the file system.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import init, kernel
from .bridge import COUNT, HELLO, Bridge, Messages, StreamError, message
from .cgroups import oom_kills
from .wire import Connection

ADDRESS = "\0skyenv-init"
KEY_BYTES, EPOCH_BYTES = 32, 16
SILENCE = 60.0
PING_EVERY = 15.0
CHUNK = 1 << 16
LIFELINE_TIMEOUT = 15.0  # longer than an init tries to stop what is inside
LAST_WORDS = 0.05
_OURS = ("SKYENV_", "KUBERNETES_", "LD_PRELOAD", "LD_LIBRARY_PATH")


class Line:
    """A stream to somebody who may be a node; a hello with the right key makes it the one. `peer` is its relay's pid:
    a guest, which the init neither stops nor kills.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self.messages = Messages()
        self.out = bytearray()
        self.heard = time.monotonic()

    def flush(self) -> None:
        """Send what the socket takes. OSError when it is gone."""
        with contextlib.suppress(BlockingIOError):
            while self.out:
                del self.out[: self.sock.send(self.out)]


class Keeper:
    """See the module. `run` is a thread's; it ends the process when nobody comes."""

    def __init__(self, listener: socket.socket, lifeline: socket.socket, config: dict[str, Any]) -> None:
        lifeline.settimeout(LIFELINE_TIMEOUT)
        self.listener, self.lifeline, self.config = listener, lifeline, config
        self.guests: set[int] = config["guests"]
        self.patience: float = config["patience"]
        self.started = time.time()
        self.image_env = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
        self.key = self.epoch = b""
        self.bridge: Bridge | None = None
        self.service: Connection | None = None
        self.line: Line | None = None
        self.strangers: list[Line] = []
        self.left = self.pinged = time.monotonic()
        self.leaving = math.inf
        self.stopped: float | None = None
        self.reports: dict[int, int] = {}
        self.operations: dict[str, Callable[[int, dict[str, Any]], dict[str, Any] | None]] = {
            "environ": lambda _n, _h: {"env": self.image_env},
            "stats": lambda _n, _h: stats(),
            "stop": lambda _n, _h: self._stop(),
            "go": lambda _n, _h: self._go(),
            "end": lambda _n, _h: self._end(),
            "capture": lambda number, _h: self._start(number, "capture", str(self.started)),
            "restore": lambda number, _h: self._start(number, "restore", str(self.started)),
        }

    def run(self) -> None:
        """Serve until nobody comes any more; closing the lifeline then ends the init."""
        while self.lifeline.fileno() >= 0 and not self._is_left():
            self._once(self._wait())
        self.lifeline.close()

    def _is_left(self) -> bool:
        now = time.monotonic()
        return now > self.leaving or (self.line is None and now - self.left > self.patience)

    def _wait(self) -> dict[int, int]:
        poller = select.poll()
        poller.register(self.listener, select.POLLIN)
        for line in (*self.strangers, *((self.line,) if self.line else ())):
            held_up = line is self.line and self.bridge is not None and self.bridge.overfull
            poller.register(line.sock, (0 if held_up else select.POLLIN) | (select.POLLOUT if line.out else 0))
        if self.bridge is not None:
            poller.register(self.bridge.fileno(), select.POLLIN)
        if self.service is not None:
            poller.register(self.service.fileno(), select.POLLIN | (select.POLLOUT if self.service.pending else 0))
        for reader in self.reports:
            poller.register(reader, select.POLLIN)
        return dict(poller.poll(1000 if self.leaving == math.inf else 10))

    def _once(self, ready: dict[int, int]) -> None:
        if self.listener.fileno() in ready:
            self._accept()
        for line in [line for line in self.strangers if line.sock.fileno() in ready]:
            self._greet(line)
        if self.line is not None and self.line.sock.fileno() in ready:
            self._receive(self.line)
        for reader in [reader for reader in self.reports if reader in ready]:
            self._ended(reader)
        if self.service is not None and self.service.fileno() in ready:
            self._serve(self.service)
        if self.bridge is not None and self.bridge.fileno() in ready:
            self.bridge.turn()
        self._keep_alive()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            self.strangers.append(Line(self.listener.accept()[0]))
        while len(self.strangers) > 4:
            self.strangers.pop(0).sock.close()

    def _read(self, line: Line) -> list[tuple[int, int, bytes]]:
        try:
            data = line.sock.recv(CHUNK)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        line.heard = time.monotonic()
        return list(line.messages.feed(data))

    def _greet(self, line: Line) -> None:
        """A hello makes a stranger the node; anything else ends the line."""
        try:
            came = self._read(line)
            if not came:
                return
            self.strangers.remove(line)
            kind, _number, hello = came[0]
            key, epoch = hello[:KEY_BYTES], hello[KEY_BYTES : KEY_BYTES + EPOCH_BYTES]
            known = same(key, self.key or key)
            if kind != HELLO or len(hello) != KEY_BYTES + EPOCH_BYTES + 2 * COUNT.size or not known:
                raise StreamError("not a node")
            count, patience = (COUNT.unpack_from(hello, KEY_BYTES + EPOCH_BYTES + at * COUNT.size)[0] for at in (0, 1))
            self.key, self.patience = key, float(patience)
            self._meet(line, epoch, count)
            for arrived in came[1:]:
                self._take(arrived)
        except (EOFError, OSError, StreamError):
            if line in self.strangers:
                self.strangers.remove(line)
            if line is self.line:
                self._hang_up()
            line.sock.close()

    def _meet(self, line: Line, epoch: bytes, count: int) -> None:
        self._hang_up()
        if epoch != self.epoch or self.bridge is None:
            self._renew(epoch)
        if self.bridge is not None:
            line.out += message(HELLO, 0, self.epoch + COUNT.pack(self.bridge.received_count))
            self.line = line
            self.guests.add(line.peer)
            self.bridge.resume(count)

    def _renew(self, epoch: bytes) -> None:
        """Another node than before: a new bridge, and fresh sockets to the init and to this thread."""
        if self.bridge is not None:
            self.bridge.close()
        if self.service is not None:
            self.service.close()
        control, for_init = socket.socketpair()
        service, for_us = socket.socketpair()
        socket.send_fds(self.lifeline, [b"a"], [for_init.fileno()])
        for_init.close()
        self.bridge, self.service, self.epoch = Bridge([control, service], passes=False), Connection(for_us), epoch

    def _receive(self, line: Line) -> None:
        try:
            for arrived in self._read(line):
                self._take(arrived)
        except (EOFError, OSError, StreamError):
            self._hang_up()

    def _take(self, arrived: tuple[int, int, bytes]) -> None:
        if self.bridge is not None:
            self.bridge.received(*arrived)

    def _hang_up(self) -> None:
        if self.line is not None:
            self.line.sock.close()
            self.guests.discard(self.line.peer)
            self.line, self.left = None, time.monotonic()
            if self.bridge is not None:
                self.bridge.pause()

    def _keep_alive(self) -> None:
        """Send what there is to send; a side that says nothing for long is gone."""
        line, bridge, now = self.line, self.bridge, time.monotonic()
        if line is None or bridge is None:
            return
        if now - self.pinged > PING_EVERY:
            bridge.ping()
            self.pinged = now
        if not line.out:
            line.out += bridge.to_send()
        try:
            line.flush()
        except OSError:
            self._hang_up()
        if now - line.heard > SILENCE:
            self._hang_up()

    # What the keeper itself answers.

    def _serve(self, service: Connection) -> None:
        try:
            for frame in service.receive():
                number = frame.header["id"]
                try:
                    answer = self.operations[frame.header["op"]](number, frame.header)
                except OSError as error:
                    answer = {"error": str(error)}
                if answer is not None:
                    service.queue({"id": number, **answer})
            service.flush()
        except (EOFError, OSError):
            service.close()
            self.service = None

    def _end(self) -> dict[str, Any]:
        """Let go soon, once the answer is on its way."""
        self.patience, self.leaving = 0.0, time.monotonic() + LAST_WORDS
        return {}

    def _stop(self) -> dict[str, Any]:
        if self.stopped is None:
            self.stopped = time.monotonic()
            if self._tell(b"f", b"fn") == b"n":
                self._go()
                return {"error": "something inside did not stop"}
        return {}

    def _go(self) -> dict[str, Any]:
        """The init is told for how long it was stopped: a running command's time stood still."""
        if self.stopped is not None:
            self._tell(b"t%.3f" % (time.monotonic() - self.stopped), b"t")
            self.stopped = None
        return {}

    def _tell(self, word: bytes, answers: bytes) -> bytes:
        self.lifeline.send(word)
        while (answer := self.lifeline.recv(16)) not in answers:
            continue
        return answer

    def _start(self, number: int, verb: str, since: str) -> None:
        """Run `tree` in a program of its own; its report is the answer."""
        if self.service is None:
            return
        data = self.service.take_fd()
        reader, writer = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, writer, 2), (os.POSIX_SPAWN_DUP2, data, 1 if verb == "capture" else 0)]
        code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.tree import main; main()"
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        program = [*self.config["python"], "-c", code, folder, verb, since]
        try:
            os.posix_spawn(program[0], program, {}, file_actions=actions)
        finally:
            os.close(writer)
            os.close(data)
        self.reports[reader] = number

    def _ended(self, reader: int) -> None:
        report, number = os.read(reader, 4096), self.reports.pop(reader)
        os.close(reader)
        if self.service is not None:
            good = report == b"ok"
            self.service.queue({"id": number} if good else {"id": number, "error": report.decode(errors="replace")})
            with contextlib.suppress(OSError):
                self.service.flush()


def same(given: bytes, known: bytes) -> bool:
    """Whether two keys are equal, in a time that does not tell where they differ. (`hmac` would load OpenSSL.)"""
    difference = len(given) ^ len(known)
    for one, other in zip(given, known, strict=False):
        difference |= one ^ other
    return not difference


def _number(*paths: str) -> int | None:
    """The first whole number in the first of these files that exists."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError, IndexError), open(path) as file:
            text = file.read().split()
            return int(text[1] if text[0] == "usage_usec" else text[0])
    return None


def stats() -> dict[str, Any]:
    """What this container uses now, as far as its control groups tell."""
    base = "/sys/fs/cgroup/"
    counter = open_oom_counter()
    micros, nanos = _number(base + "cpu.stat"), _number(base + "cpuacct/cpuacct.usage")
    memory = _number(base + "memory.current", base + "memory/memory.usage_in_bytes")
    answer = {
        "memory_bytes": None if memory is None else max(0, memory - _file_cache(base)),
        "cpu_seconds": micros / 1e6 if micros is not None else nanos / 1e9 if nanos is not None else None,
        "pids": _number(base + "pids.current", base + "pids/pids.current"),
        "oom_kills": oom_kills(counter) if counter is not None else None,
    }
    if counter is not None:
        os.close(counter)
    return answer


def _file_cache(base: str) -> int:
    """Bytes that are counted as memory but would be dropped at once."""
    for name, key in (("memory.stat", "inactive_file"), ("memory/memory.stat", "total_inactive_file")):
        with contextlib.suppress(OSError), open(base + name) as file:
            return next((int(line.split()[1]) for line in file if line.startswith(f"{key} ")), 0)
    return 0


def open_oom_counter() -> int | None:
    """The file that counts this container's OOM kills; None where there is none."""
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            return os.open(f"/sys/fs/cgroup/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return None


def main() -> NoReturn:
    """Entry point: argument 1 is the configuration as JSON (run_dir, home, shells, file_bytes, patience, python)."""
    config = {"isolated": True, **json.loads(sys.argv[1]), "guests": set()}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(ADDRESS)
    listener.listen(8)
    listener.setblocking(False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = Keeper(listener, ours, config)
    nobody, control = socket.socketpair()
    nobody.close()
    os.chdir("/")
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if config["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (config["file_bytes"], config["file_bytes"]))
    kernel.rename_process("skyenv-init")
    threading.Thread(target=keeper.run, daemon=True).start()
    init.main(control, theirs, config, open_oom_counter())
