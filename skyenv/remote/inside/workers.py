"""Slow work on files, done in children of the launcher while that goes on serving."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from . import kernel
from .children import remove_tree

Done = Callable[[str], None]


class Workers:
    """Owns the children and the pipes on which they report. Whoever reaps children hands their pids to `reaped`."""

    def __init__(self) -> None:
        self._working: dict[int, tuple[Done, int]] = {}
        self._removing: dict[int, str] = {}

    @property
    def pids(self) -> set[int]:
        """The living children."""
        return {*self._working, *self._removing}

    def start(self, work: Callable[[], None], done: Done) -> None:
        """Run `work` in a child; `done` hears "ok" or what went wrong."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                _be_quiet(writer)
                work()
                os.write(writer, b"ok")
            except OSError as error:
                os.write(writer, str(error).encode()[:4096])
            finally:
                os._exit(0)
        os.close(writer)
        self._working[pid] = (done, reader)

    def remove_later(self, path: str) -> None:
        """Rename a directory at once and remove it in a child; nothing when there is none.

        That child is no copy of this process, which would cost more than most removals.
        """
        if not os.path.isdir(path):
            return
        trash = f"{path}.gone"
        with contextlib.suppress(OSError):
            kernel.unmount(path)
        os.rename(path, trash)
        silence = [(os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)]  # what fails is tried again more patiently
        self._removing[os.posix_spawnp("rm", ["rm", "-rf", "--", trash], os.environ, file_actions=silence)] = trash

    def reaped(self, pid: int) -> None:
        """A child has ended; nothing when it is none of these."""
        trash = self._removing.pop(pid, None)
        if trash is not None and os.path.isdir(trash):  # what may not be entered or written needs another mode first
            self.start(lambda: remove_tree(trash), lambda _answer: None)
        if pid in self._working:
            done, reader = self._working.pop(pid)
            answer = os.read(reader, 4096).decode(errors="replace")
            os.close(reader)
            done(answer or "killed")

    def kill(self) -> None:
        """End the work; what is being removed goes on."""
        for pid in self._working:
            os.kill(pid, signal.SIGKILL)


def _be_quiet(*keep: int) -> None:
    """In a child: no descriptor and no signal of the launcher's."""
    signal.set_wakeup_fd(-1)
    kernel.close_all_but(*keep)
