"""Runs inside the sandbox: executes cells in one namespace, for as long as the episode lasts.

`script.py DIR` waits on the FIFO `DIR/in` for cell numbers. Cell N is read from `DIR/cell.N`, its output goes to
`DIR/out.N`, and the FIFO `DIR/done.N` is open for as long as the cell runs: `ok` is written at its end, and whoever
reads finds it closed without that when this process died. `DIR/finished` holds the number of the last finished cell.
Standard library only, for any Python from 3.6 on.
"""

# ruff: noqa: PTH104, PTH118, PTH123

import ast
import code
import linecache
import os
import signal
import sys
from contextlib import suppress
from types import CodeType


class Kernel(code.InteractiveInterpreter):
    """One namespace, and how a cell runs in it."""

    failed = False

    def cell(self, text: str, name: str) -> None:
        """Run the statements, showing the value of the last one if it is an expression."""
        linecache.cache[name] = (len(text), None, [line + "\n" for line in text.split("\n")], name)
        try:
            tree = ast.parse(text, name)
            last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
            parts = [compile(tree, name, "exec")]
            parts += [compile(ast.Interactive([node]), name, "single") for node in last]
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            self.showsyntaxerror(name)
            return
        self.failed = False
        for part in parts:
            if not self.failed:
                self.runcode(part)

    def runcode(self, code: CodeType) -> None:
        """As the base class does, but leaving by `exit()` only ends the cell."""
        try:
            super().runcode(code)
        except SystemExit as error:
            self.failed = True
            self.write(f"SystemExit: {error.code}\n")

    def showtraceback(self) -> None:
        """Print it and remember that the cell failed."""
        self.failed = True
        super().showtraceback()


def redirect(path: str, flags: int) -> None:
    """Let standard output and standard error go to a file."""
    target = os.open(path, flags, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def put(path: str, text: str) -> None:
    """Write a small file that readers see either as it was or as it will be."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def main(folder: str) -> None:
    """Serve cells until killed, in a process of its own."""
    if os.fork():
        return
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = [""]
    sys.path[0] = ""
    kernel = Kernel({"__name__": "__main__", "__doc__": None})
    requests = os.open(os.path.join(folder, "in"), os.O_RDWR)
    put(os.path.join(folder, "pid"), str(os.getpid()))
    while True:
        number = str(int(os.read(requests, 32)))
        done = os.open(os.path.join(folder, "done." + number), os.O_WRONLY)
        with open(os.path.join(folder, "cell." + number), encoding="utf-8") as file:
            text = file.read()
        run(kernel, text, os.path.join(folder, "out." + number), f"<cell {number}>")
        put(os.path.join(folder, "finished"), number)
        with suppress(BrokenPipeError):
            os.write(done, b"ok\n")
        os.close(done)


def run(kernel: Kernel, text: str, output: str, name: str) -> None:
    """Run one cell with its output in a file; SIGINT raises KeyboardInterrupt in it and nowhere else."""
    redirect(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kernel.cell(text, name)
    except KeyboardInterrupt:
        kernel.write("KeyboardInterrupt\n")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        redirect(os.devnull, os.O_WRONLY)


if __name__ == "__main__":
    main(sys.argv[1])
