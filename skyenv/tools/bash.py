"""The shell tool: one persistent shell, at most one running command, bounded readable output.

The tool renders and enforces the protocol with the model; the sandbox owns the shell and its processes. State of an
episode: whether a command is running, and how many long outputs were saved. Infrastructure errors pass through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyenv.core import Sandbox
from skyenv.errors import EnvError, SandboxPathError
from skyenv.tools.output import clean, cut_middle
from skyenv.types import ExecResult, ToolSpec

_INTERRUPT = frozenset({"c-c", "^c", "ctrl+c", "ctrl-c"})
_OTHER_KEYS = frozenset({"c-d", "^d", "ctrl+d", "ctrl-d", "c-z", "^z", "ctrl+z", "ctrl-z"})
_CODES = {"c": "\x03", "d": "\x04", "z": "\x1a"}

_DESCRIPTION = """\
Run a bash command in a persistent shell.
* State carries over between calls: working directory, variables, functions, background jobs.
* Several commands: chain them with && or ; or write them on separate lines.
* A command that prints nothing new for {soft:g} seconds is left running and the call returns. Then send an empty \
command to wait for more output, or C-c to interrupt it. Nothing else runs until it ends.
* For a command that is silent for long, pass `timeout` in seconds (at most {hard:g}): the call then waits for the \
end, and the command is killed when the time is up. Start servers in the background: `server > log 2>&1 &`.
* {programs}
* Long output is shown without its middle; the full text is saved to a file that the result names."""
_WITHOUT = "Programs get no terminal and an empty standard input; use options or files instead of interactive prompts."
_WITH = """\
Programs get no terminal and an empty standard input. For one that asks questions, set `terminal`; then send it text, \
an empty line, C-c or C-d with `is_input`. Such a command runs in a shell of its own: what it does to the working \
directory and variables is not kept."""


class ExecuteBash:
    """`execute_bash(command, is_input, timeout)`; one instance an episode.

    `soft_timeout`: seconds without new output after which a call returns while the command goes on. `max_timeout`:
    seconds after which any command is killed, also the largest `timeout` a model may ask for (larger is clamped).
    `terminal`: whether the model may ask for a terminal, with one more parameter of that name.
    """

    def __init__(
        self,
        *,
        max_chars: int = 16_000,
        soft_timeout: float = 30.0,
        max_timeout: float = 600.0,
        save_dir: str = "/tmp",
        terminal: bool = False,
    ) -> None:
        self._max_chars = max_chars
        self._soft_timeout = soft_timeout
        self._max_timeout = max_timeout
        self._save_dir = save_dir
        self._running: str | None = None
        self._saved = 0
        self._on_terminal = False
        self._interrupts = 0
        programs = _WITH if terminal else _WITHOUT
        description = _DESCRIPTION.format(soft=soft_timeout, hard=max_timeout, programs=programs)
        properties = {**_PARAMETERS["properties"], **(_TERMINAL if terminal else {})}
        self.spec = ToolSpec("execute_bash", description, {**_PARAMETERS, "properties": properties})

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Run, poll or interrupt; see the tool's description for what the model may do."""
        command: str = arguments["command"]
        timeout: float | None = arguments.get("timeout")
        if timeout is not None and timeout <= 0:
            return f"ERROR: timeout must be greater than 0 seconds; got {timeout:g}. Nothing was run."
        if timeout is not None:
            timeout = min(timeout, self._max_timeout)
        key = command.strip().lower()
        if self._running is not None and self._on_terminal:
            return await self._talk(command, arguments.get("is_input", False), timeout, sandbox)
        if self._running is not None:
            return await self._follow(key, timeout, sandbox)
        if not key:
            return "ERROR: no command is running, so there is no output to wait for. Send a command."
        if key in _INTERRUPT | _OTHER_KEYS:
            return f"ERROR: no command is running, so {command.strip()} has nothing to act on."
        if arguments.get("is_input", False):
            return "ERROR: no command is running that could take input. To run a command, leave is_input out."
        self._on_terminal, self._interrupts = arguments.get("terminal", False), 0
        return await self._start(command, timeout, sandbox)

    async def _start(self, command: str, timeout: float | None, sandbox: Sandbox) -> str:
        soft = self._soft_timeout if timeout is None else None
        hard = self._max_timeout if timeout is None else timeout
        if self._on_terminal:
            result = await sandbox.exec(command, timeout=hard, soft_timeout=soft, terminal=True)
        else:
            result = await sandbox.exec(command, timeout=hard, soft_timeout=soft)
        self._running = command if result.running else None
        return await self._render(result, sandbox, silence=soft, limit=hard)

    async def _follow(self, key: str, timeout: float | None, sandbox: Sandbox) -> str:
        """Answer a call that comes in while an earlier command is running."""
        earlier = _label(self._running or "")
        if not key:
            silence = timeout or self._soft_timeout
            result = await sandbox.poll(soft_timeout=silence)
        elif key in _INTERRUPT:
            silence = None
            result = await sandbox.interrupt()
        elif key in _OTHER_KEYS:
            return f"ERROR: {earlier} has no terminal, so {key} cannot reach it. Send C-c to interrupt it."
        else:
            return (
                f"ERROR: {earlier} is still running, and your text was neither run nor delivered: programs have no "
                "terminal and an empty standard input. Send an empty command to wait for it, or C-c to interrupt it."
            )
        return await self._render_earlier(result, sandbox, silence)

    async def _talk(self, command: str, is_input: bool, timeout: float | None, sandbox: Sandbox) -> str:
        """Answer a call that comes in while a command on a terminal is running."""
        earlier, key, silence = _label(self._running or ""), command.strip().lower(), timeout or self._soft_timeout
        pressed = key in _INTERRUPT | _OTHER_KEYS
        if command.strip() and not is_input and not pressed:
            return (
                f"ERROR: {earlier} is still running, so your command was not run. Set is_input to send it as text to "
                "that program, send an empty command to wait, or C-c to interrupt it."
            )
        self._interrupts = self._interrupts + 1 if key in _INTERRUPT else 0
        try:
            if self._interrupts > 1:
                result = await sandbox.interrupt()
            elif pressed or is_input:
                text = _CODES[key[-1]] if pressed else command.removesuffix("\n") + "\n"
                result = await sandbox.send_input(text, soft_timeout=silence)
            else:
                result = await sandbox.poll(soft_timeout=silence)
        except EnvError as error:
            return f"ERROR: the text did not reach {earlier}: {error}."
        return await self._render_earlier(result, sandbox, silence)

    async def _render_earlier(self, result: ExecResult, sandbox: Sandbox, silence: float | None) -> str:
        earlier = _label(self._running or "")
        if not result.running:
            self._running = None
        body = await self._render(result, sandbox, silence=silence, limit=self._max_timeout)
        return f"[Output of the earlier command {earlier}]\n{body}"

    async def _render(self, result: ExecResult, sandbox: Sandbox, *, silence: float | None, limit: float) -> str:
        lines = [await self._body(result, sandbox)]
        if result.running:
            lines.append(
                f"[No new output for {silence or self._soft_timeout:g} seconds; the command is still running. "
                f"Send an empty command to wait, {'text with is_input, ' * self._on_terminal}or C-c to interrupt it.]"
            )
        if result.timed_out:
            lines.append(f"[The command was killed: it ran longer than {limit:g} seconds.]")
        if result.oom:
            lines.append("[The command was killed: the sandbox ran out of memory.]")
        if result.session_restarted:
            lines.append(
                "[The shell ended and a new one was started: working directory and exported variables were kept, "
                "functions, aliases and other variables were not.]"
            )
        if result.cwd:
            gone = "; it was removed" if result.cwd_missing else ""
            lines.append(f"[Current working directory: {result.cwd}{gone}]")
        if not result.running:
            lines.append(f"[Command finished with exit code {result.exit_code}]")
        return "\n".join(line for line in lines if line)

    async def _body(self, result: ExecResult, sandbox: Sandbox) -> str:
        text = clean(result.output).rstrip("\n")
        note = f"; {result.output_bytes} bytes were printed in all" if result.truncated else ""
        if len(text) <= self._max_chars:
            return text
        path = f"{self._save_dir}/command_output_{self._saved + 1}.txt"
        try:
            await sandbox.write_file(path, text.encode())
        except SandboxPathError:
            return cut_middle(text, self._max_chars, note)
        self._saved += 1
        kept = "what was kept of it" if result.truncated else "the full text"
        return cut_middle(text, self._max_chars, f"{note}; {kept} is in {path}")


def _label(command: str) -> str:
    first = command.strip().split("\n", 1)[0]
    return f"`{first[:80]}...`" if len(first) > 80 or first != command.strip() else f"`{first}`"


_TERMINAL: Mapping[str, Any] = {
    "terminal": {
        "type": "boolean",
        "description": "Whether to run the command on a terminal, for programs that ask questions. Default: false.",
    }
}
_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "string",
            "description": "The command to run. Empty: wait for the running command. C-c: interrupt it.",
        },
        "is_input": {
            "type": "boolean",
            "description": "True when the text is meant for the running command. Default: false.",
        },
        "timeout": {
            "type": "number",
            "description": "Hard limit in seconds for this command; it is killed when the time is up.",
        },
    },
    "required": ["command"],
}
