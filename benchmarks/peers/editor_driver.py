"""Runs rows on another project's editor, inside that editor's own environment: `editor_driver.py aci|tools`.

Reads one JSON object a line and answers one: the calls of a row in, `[text, refused]` of each out, or what went
wrong. Each row runs in a process of its own, so that an editor that hangs or breaks spoils nothing else. Imports
nothing of this project.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 4 << 30
Call = Callable[[dict[str, Any]], tuple[str, bool]]


def aci(root: str, raced: Any) -> Call:
    """The editor of openhands-aci, called as its runtime calls it."""
    from openhands_aci.editor.editor import OHEditor
    from openhands_aci.editor.exceptions import ToolError

    editor = OHEditor(workspace_root=root)
    raced(editor)

    def call(arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            result = editor(**arguments)
        except ToolError as error:
            return str(error.message), True
        return result.error or result.output, bool(result.error)

    return call


def tools(root: str, raced: Any) -> Call:
    """The editor of openhands-tools: arguments repaired and validated as its agent does, then the executor."""
    from openhands.sdk.agent.utils import fix_malformed_tool_arguments
    from openhands.tools.file_editor.definition import FileEditorAction
    from openhands.tools.file_editor.impl import FileEditorExecutor
    from pydantic import ValidationError

    execute = FileEditorExecutor(workspace_root=root)
    raced(execute.editor)

    def call(arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            action = FileEditorAction.model_validate(fix_malformed_tool_arguments(arguments, FileEditorAction))
        except ValidationError as error:
            return str(error), True
        seen = execute(action)
        return "\n".join(part.text for part in seen.content if part.type == "text"), seen.is_error

    return call


def run_row(make: Callable[[str, Any], Call], row: dict[str, Any]) -> list[tuple[str, bool]]:
    """Make the calls of a row in this process."""
    os.chdir(row["root"])
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if row["limit"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (row["limit"], row["limit"]))
    race: list[tuple[str, bytes]] = []

    def raced(editor: Any) -> None:
        """Let somebody else write just before the editor does."""
        write = editor.write_file

        def write_after_another(*args: Any, **options: Any) -> Any:
            for path, data in race:
                Path(path).write_bytes(data)
            race.clear()
            return write(*args, **options)

        editor.write_file = write_after_another

    call, answers = make(row["root"], raced), []
    for step in row["steps"]:
        if step["write"] is not None:
            Path(step["path"]).write_bytes(base64.b64decode(step["write"]))
            answers.append(("", False))
            continue
        if step["race"] is not None:
            race.append((step["path"], base64.b64decode(step["race"])))
        answers.append(call({"command": step["command"], "path": step["path"], **step["arguments"]}))
    return answers


def in_child(make: Callable[[str, Any], Call], row: dict[str, Any]) -> Any:
    """Run a row in a forked process, for so many seconds at most."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            answer: Any = {"answers": run_row(make, row)}
        except Exception as error:  # noqa: BLE001  whatever a foreign editor raises is the row's result
            answer = {"raised": f"{type(error).__name__}: {error}"[:500]}
        with os.fdopen(writer, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    received = b""
    while select.select([reader], [], [], row["seconds"])[0] and (chunk := os.read(reader, 1 << 16)):
        received += chunk
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(received) if received else {"raised": f"no answer within {row['seconds']} seconds"}


def main() -> None:
    """Serve rows until the input ends; whatever the editor prints itself goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    make = {"aci": aci, "tools": tools}[sys.argv[1]]
    make(str(Path.cwd()), lambda editor: None)
    for line in sys.stdin:
        print(json.dumps(in_child(make, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
