"""Run in inspect-ai's environment, `python -m tests.adapters.playing.inspect_eval OUT WHAT`: what came of it, as JSON.

`eval` is an evaluation by inspect's own `eval` whose model is a script: a tool that runs bash in a sandbox of ours,
files of samples, a scorer that looks into the sandbox. `checks` are inspect's own checks of a sandbox provider,
`mistakes` what wrong settings are answered with and what is left of a cancelled call.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironment, sandbox
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

from skyenv.adapters.inspect_ai import SkyenvSandbox, SkyenvSandboxConfig


@scorer(metrics=[accuracy()])
def total_in_report() -> Any:
    """Whether the report in the sandbox holds the target."""

    async def score(state: TaskState, target: Target) -> Score:
        try:
            report = await sandbox().read_file("report.txt")
        except FileNotFoundError:
            return Score(value=0, answer="")
        return Score(value=int(report.strip() == target.text), answer=report)

    return score


def evaluation(folder: str) -> dict[str, Any]:
    """Two samples, one of which the model gets right, one at a time."""
    words = [
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "pwd; wc -l < sales.csv; id -u; sleep 0"}),
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "echo total: 42 > report.txt"}),
        ModelOutput.from_content("mockllm/model", "Done."),
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "ls; cat report.txt; echo a >&2; exit 3"}),
        ModelOutput.from_content("mockllm/model", "I cannot."),
    ]
    for word in words:
        word.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # else inspect fetches a tokenizer
    files = {"sales.csv": "north,20\nsouth,15\nwest,7\n"}
    task = Task(
        dataset=[Sample(input="Add up.", target="total: 42", files=files, id=number) for number in (1, 2)],
        solver=[use_tools(bash(timeout=30)), generate()],
        scorer=total_in_report(),
        sandbox=("skyenv", SkyenvSandboxConfig(env={"LC_ALL": "C"}, limits={"memory_bytes": 512 << 20})),
    )
    model = get_model("mockllm/model", custom_outputs=words)
    (log,) = eval(task, model=model, log_dir=folder, max_samples=1, display="none", log_format="json")
    return {
        "status": log.status,
        "error": str(log.error)[:2000],
        "scores": [[score.value for score in (sample.scores or {}).values()] for sample in log.samples or []],
        "tools": [[m.text for m in sample.messages if m.role == "tool"] for sample in log.samples or []],
        "found": registry_find_sandboxenv("skyenv") is SkyenvSandbox,
        "logged": json.loads(Path(log.location.removeprefix("file://")).read_text())["eval"]["sandbox"],
    }


async def checks() -> dict[str, str]:
    """What failed, by the check's name; all of them in one sandbox, as inspect does."""
    found = [check for name, check in vars(self_check).items() if name.startswith("test_")]
    failed: dict[str, str] = {}
    (box,) = (await SkyenvSandbox.sample_init("checks", None, {})).values()
    try:
        for check in found:
            if (why := await failure(check, box)) is not None:
                failed[check.__name__] = why
    finally:
        await SkyenvSandbox.sample_cleanup("checks", None, {"default": box}, False)
    return {"checked": str(len(found)), **failed}


async def failure(check: Callable[..., Coroutine[Any, Any, None]], box: SandboxEnvironment) -> str | None:
    """Why a check failed."""
    try:
        await check(box)
    except Exception:  # noqa: BLE001  whatever a check raises is what it found
        return traceback.format_exc(limit=-3)
    return None


async def mistakes() -> list[str]:
    """What wrong settings are answered with, and a call that is cancelled ends inside as well."""
    said = []
    for config in (SkyenvSandboxConfig(limits={"memory": 1}), SkyenvSandboxConfig(url="http://127.0.0.1:9")):
        try:
            await SkyenvSandbox.sample_init("mistakes", config, {})
        except Exception as error:  # noqa: BLE001
            said.append(f"{type(error).__name__}: {error}")
    (box,) = (await SkyenvSandbox.sample_init("mistakes", None, {})).values()
    with anyio.move_on_after(1.0):
        await box.exec(["sleep", "600"])
    found = await box.exec(["sh", "-c", "pgrep -x sleep || echo none"], timeout=60)
    said.append(found.stdout.strip())
    await SkyenvSandbox.sample_cleanup("mistakes", None, {"default": box}, True)
    return said


def main() -> None:
    """Write what was asked for."""
    out, what = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        result: Any = (
            evaluation(folder) if what == "eval" else anyio.run({"checks": checks, "mistakes": mistakes}[what])
        )
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
