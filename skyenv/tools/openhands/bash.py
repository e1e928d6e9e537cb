"""`execute_bash` in the words of OpenHands 0.25: status, directory and interpreter lines, middle cut at 30 000.

Output is stripped at both ends and at the end of each line, as its terminal does. Where it drives a terminal, this is
the sandbox's shell: several lines run as one script, and text for a running program is refused, since programs have
no terminal. State of an episode: whether a command is running.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyenv.core import Sandbox
from skyenv.tools.output import clean
from skyenv.types import ExecResult, ToolSpec

_CUT = "\n[... Observation truncated due to length ...]\n"
_PREVIOUS = "[Below is the output of the previous command.]\n"
_WAIT = (
    "You may wait longer to see additional output{of_it} by sending empty command '', "
    "send other commands to interact with the current process, "
)
_KEYS = "or send keys to interrupt/kill the command.]"
_REFUSED = (
    '\n[Your command "{command}" is NOT executed. The previous command is still running - You CANNOT send new commands '
    "until the previous command is completed. By setting `is_input` to `true`, you can interact with the current "
    "process: "
    + _WAIT.format(of_it=" of the previous command")
    + 'or send keys ("C-c", "C-z", "C-d") to interrupt/kill the previous command before sending your new command.]'
)
_PROBE = "__skyenv_status=$?; command -v python; return $__skyenv_status"
_GLANCE = 0.05


class OpenHandsBash:
    """`execute_bash(command, is_input)`; one instance an episode.

    `soft_timeout`: seconds without new output after which a call returns while the command goes on; `max_timeout`:
    seconds after which it is killed; `max_chars`: of one observation.
    """

    def __init__(self, *, max_chars: int = 30_000, soft_timeout: float = 30.0, max_timeout: float = 600.0) -> None:
        self._max_chars = max_chars
        self._soft_timeout = soft_timeout
        self._max_timeout = max_timeout
        self._running = False
        self._printed = False
        self.spec = ToolSpec("execute_bash", _DESCRIPTION, _PARAMETERS)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Run, poll or interrupt."""
        text = await self._answer(arguments["command"].strip(), arguments.get("is_input") == "true", sandbox)
        half = self._max_chars // 2
        return text if len(text) <= self._max_chars else text[:half] + _CUT + text[-half:]

    async def _answer(self, command: str, is_input: bool, sandbox: Sandbox) -> str:
        if self._running:
            return await self._follow(command, is_input, sandbox)
        if not command:
            return "ERROR: No previous running command to retrieve logs from."
        if is_input:
            return "ERROR: No previous running command to interact with."
        return await self._start(command, sandbox)

    async def _start(self, command: str, sandbox: Sandbox) -> str:
        self._printed = False
        result = await sandbox.exec(command, timeout=self._max_timeout, soft_timeout=self._soft_timeout)
        return await self._render(result, sandbox, "")

    async def _follow(self, command: str, is_input: bool, sandbox: Sandbox) -> str:
        prefix = _PREVIOUS if self._printed else ""
        if not command:
            return await self._render(await sandbox.poll(soft_timeout=self._soft_timeout), sandbox, prefix)
        if is_input and command in ("C-c", "C-z", "C-d"):
            if command != "C-c":
                return f"ERROR: programs have no terminal, so {command} cannot reach it. Send C-c to interrupt it."
            return await self._render(await sandbox.interrupt(), sandbox, "", key="C")
        if is_input:
            return "ERROR: the text was not delivered: programs have no terminal and an empty standard input."
        result = await sandbox.poll(soft_timeout=_GLANCE)
        output = prefix + _tidy(result)
        if result.running:
            self._printed = self._printed or bool(result.output)
            return output + _REFUSED.format(command=command)
        self._running = False
        answer = await self._start(command, sandbox)
        return f"{output}\n{answer}" if result.output else answer

    async def _render(self, result: ExecResult, sandbox: Sandbox, prefix: str, key: str = "") -> str:
        self._running = result.running
        self._printed = self._printed or bool(result.output)
        text = prefix + _tidy(result)
        if result.running:
            wait = _WAIT.format(of_it="") + _KEYS
            return f"{text}\n[The command has no new output after {self._soft_timeout:g} seconds. {wait}"
        sent = f" CTRL+{key} was sent." if key else ""
        text += f"\n[The command completed with exit code {result.exit_code}.{sent}]"
        if result.timed_out:
            text += f"\n[The command was killed: it ran longer than {self._max_timeout:g} seconds.]"
        if result.session_restarted:
            text += "\n[The shell ended and a new one was started.]"
        python = await sandbox.exec(_PROBE, timeout=10.0)
        lines = [f"[Current working directory: {result.cwd}]"] if result.cwd else []
        if found := python.output.strip():
            lines.append(f"[Python interpreter: {found}]")
        return "\n".join([text, *lines, f"[Command finished with exit code {result.exit_code}]"])


def _tidy(result: ExecResult) -> str:
    return "\n".join(line.rstrip() for line in clean(result.output).split("\n")).strip()


_DESCRIPTION = """\
Execute a bash command in a persistent shell session.
* One command at a time; chain several with && or ;.
* A command that prints nothing new for a while returns with exit code -1 and goes on. Then send an empty `command` \
for more output, or, with `is_input` set to `true`, `C-c` to interrupt it.
* Run long-lived programs in the background with their output in a file: `python3 app.py > server.log 2>&1 &`."""

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "string",
            "description": "The bash command to execute; empty: more output of the running one; or a key like `C-c`.",
        },
        "is_input": {
            "type": "string",
            "enum": ["true", "false"],
            "description": "Whether the command is input to the running process. Default: false.",
        },
    },
    "required": ["command"],
}
