"""The tool `ipython`: cells of Python that share one namespace, in a process of their own inside the sandbox.

The process is started by the first cell with the `python` that the shell finds, and lives as long as the sandbox. It
is reached through files and FIFOs in a private directory; commands are fixed text. A cell that runs out of time is
interrupted, and when that does not help the process is killed and the next cell starts a new one, which is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from skyenv.core import Sandbox
from skyenv.errors import EnvError, SandboxPathError
from skyenv.tools.output import clean, cut_middle
from skyenv.types import ExecResult, ToolSpec

_DIR = "/tmp/.skyenv_kernel"
_GONE, _NO_PYTHON, _DEAD = 85, 86, 87
_LOST = "variables and imports of earlier cells are gone"
_KEEP = 1 << 20

_START = f"""\
command -v python >/dev/null 2>&1 && python=python || python=python3
command -v "$python" >/dev/null 2>&1 || exit {_NO_PYTHON}
rm -f {_DIR}/pid {_DIR}/in; mkfifo {_DIR}/in || exit {_DEAD}
"$python" {_DIR}/script.py {_DIR} </dev/null >/dev/null 2>&1
i=0; while [ ! -s {_DIR}/pid ] && [ $i -lt 200 ]; do sleep 0.05; i=$((i+1)); done
[ -s {_DIR}/pid ]
"""
# Opening `done` waits until the kernel has taken the cell; reading it then ends with the cell or with the kernel.
_CELL = f"""\
kill -0 "$(cat {_DIR}/pid)" 2>/dev/null || exit {_GONE}
rm -f {_DIR}/done.$1; mkfifo {_DIR}/done.$1 && echo $1 >{_DIR}/in
status=; read status <{_DIR}/done.$1; [ "$status" = ok ] || exit {_DEAD}
"""
_INTERRUPT = f"""\
pid=$(cat {_DIR}/pid); kill -INT -$pid 2>/dev/null
i=0; while [ $i -lt 30 ]; do
  [ "$(cat {_DIR}/finished 2>/dev/null)" = $1 ] && exit 0
  sleep 0.1; i=$((i+1))
done
kill -KILL -$pid 2>/dev/null; exit {_DEAD}
"""


class IPython:
    """`ipython(code, timeout)`; one instance an episode.

    `timeout`: seconds a cell may run when the model names none, `max_timeout` the most it may ask for (larger is
    clamped). `max_chars` bounds what one call shows.
    """

    def __init__(self, *, max_chars: int = 16_000, timeout: float = 120.0, max_timeout: float = 600.0) -> None:
        self._max_chars = max_chars
        self._timeout = timeout
        self._max_timeout = max_timeout
        self._cells = 0
        self._started = False
        self.spec = ToolSpec("ipython", _DESCRIPTION.format(timeout=timeout, most=max_timeout), _PARAMETERS)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Run one cell."""
        timeout: float = arguments.get("timeout", self._timeout)
        if timeout <= 0:
            return f"ERROR: timeout must be greater than 0 seconds; got {timeout:g}. Nothing was run."
        try:
            return await self._run(arguments["code"], min(timeout, self._max_timeout), sandbox)
        except SandboxPathError as error:
            return f"ERROR: the kernel cannot be reached: {error.strerror or error}. Nothing was run."
        except EnvError:
            return "ERROR: a command is still running in the shell. Wait for it or interrupt it, then run the cell."

    async def _run(self, code: str, timeout: float, sandbox: Sandbox) -> str:
        self._cells += 1
        await sandbox.write_file(f"{_DIR}/cell.{self._cells}", code.replace("\r\n", "\n").encode())
        notes: list[str] = []
        result = await self._cell(timeout, sandbox) if self._started else None
        if result is None or result.exit_code == _GONE:
            if refused := await self._start(sandbox):
                return refused
            if result is not None:
                notes.append(f"[The Python process was gone and a new one was started: {_LOST}.]")
            result = await self._cell(timeout, sandbox)
        if result.timed_out:
            notes.append(f"[The cell was interrupted: it ran longer than {timeout:g} seconds.]")
            result = await sandbox.exec(f"/bin/sh {_DIR}/interrupt.sh {self._cells}", timeout=15.0)
        if result.exit_code != 0:
            self._started = False
            notes.append(f"[The Python process ended; the next cell starts a new one: {_LOST}.]")
        return "\n".join([await self._output(sandbox), *notes]).strip("\n") or "[The cell printed nothing.]"

    async def _cell(self, timeout: float, sandbox: Sandbox) -> ExecResult:
        return await sandbox.exec(f"/bin/sh {_DIR}/run.sh {self._cells}", timeout=timeout)

    async def _start(self, sandbox: Sandbox) -> str:
        script = resources.files("skyenv.tools.kernel").joinpath("script.py").read_bytes()
        files = {"script.py": script, "start.sh": _START.encode(), "run.sh": _CELL.encode()}
        files["interrupt.sh"] = _INTERRUPT.encode()
        for name, data in files.items():
            await sandbox.write_file(f"{_DIR}/{name}", data)
        result = await sandbox.exec(f"/bin/sh {_DIR}/start.sh", timeout=30.0)
        self._started = result.exit_code == 0
        if result.exit_code == _NO_PYTHON:
            return "ERROR: there is no python in this sandbox. Nothing was run."
        return "" if self._started else f"ERROR: the Python process did not start: {clean(result.output)[:300]}"

    async def _output(self, sandbox: Sandbox) -> str:
        path = f"{_DIR}/out.{self._cells}"
        try:
            size = (await sandbox.stat(path)).size
            data = await sandbox.read_file(path, max_bytes=_KEEP)
            if size > _KEEP:
                tail = await sandbox.read_file(path, offset=max(_KEEP, size - _KEEP))
                data += f"\n[... {size - len(data) - len(tail)} bytes left out ...]\n".encode() + tail
        except SandboxPathError:
            return ""
        text = clean(data.decode(errors="replace")).rstrip("\n")
        return cut_middle(text, self._max_chars, f"; the full text is in {path}")


_DESCRIPTION = """\
Run a cell of Python code. Variables, imports and functions stay for the next cells.
* Shows what the cell prints, and the value of its last line if that is an expression.
* A cell may run {timeout:g} seconds; pass `timeout` for more (at most {most:g}). Then it is interrupted.
* It is plain Python: no magics and no `!command`; use the shell for commands. Standard input is empty."""

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "The code of the cell."},
        "timeout": {"type": "number", "description": "Seconds the cell may run."},
    },
    "required": ["code"],
}
