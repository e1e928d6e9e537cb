"""What a group's init costs with a shared beginning and without, in real local sandboxes.

A group of siblings of one task goes through the pipeline with a script that calls `finish` at once, so that init and
the grading's opening are what there is. Both ways alternate within one run, after one that warms up; the environment
itself is prepared and cached for both. `init_seconds` is the wall time from the run's start until the last sibling is
ready, `slot_seconds` the sum over siblings of the time in a slot of the init stage, `cpu_seconds` what the whole
machine spent meanwhile. `--files` of 8 KiB are added to the repository: 1000 make one of 8 MiB.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from pathlib import Path
from typing import Any

import anyio
from _measure import parse, report

import skyenv
from skyenv.engines.scripted import ScriptedEngine
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.sources import FilesSource, default_cache, fetch_tree
from skyenv.envs.swe.tasks import SweTask
from skyenv.rollout import byte_renderer
from skyenv.types import ToolCall
from skyenv.vector.pipeline import RolloutPipeline, StageWidths
from skyenv.vector.progress import PipelineEvent

TASK = "clamp-upper-bound"


def busy_seconds() -> float:
    """Processor seconds that this machine has spent, all processes together."""
    user, nice, system, _idle, _wait, irq, soft, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, soft))) / 100


async def one_group(provider: Any, task: SweTask, size: int, fork: bool) -> dict[str, float]:
    """Play one group."""
    renderer = byte_renderer()
    ready: list[float] = []

    def note(event: PipelineEvent) -> None:
        if event.kind == "stage" and event.state == "run_wait":
            ready.append(time.monotonic())

    pipeline = RolloutPipeline(
        engine=ScriptedEngine(renderer, [renderer.format.render_call(ToolCall("finish", {}))]),
        renderer=renderer,
        make_env=lambda: skyenv.make("SkyRL/SWE-v0", tasks=[task], sandbox=provider),
        widths=StageWidths(init=size, run=size, eval=size),
        fork_groups=fork,
        on_event=note,
    )
    started, cpu = time.monotonic(), busy_seconds()
    found = [t async for t in pipeline.run([task], size)]
    assert all(t.failure is None for t in found)
    return {
        "init_seconds": max(ready) - started,
        "slot_seconds": sum(t.seconds["init"] for t in found),
        "group_seconds": time.monotonic() - started,
        "cpu_seconds": busy_seconds() - cpu,
    }


async def padded(task: SweTask, files: int) -> SweTask:
    """The task with so many files of 8 KiB more in its repository, as a grown project has them."""
    chosen = random.Random(0)
    tree = await fetch_tree(task.source, base=task.base, cache=default_cache())
    more = {f"pad/{number % 100}/{number}.txt": chosen.randbytes(4 << 10).hex().encode() for number in range(files)}
    return dataclasses.replace(task, source=FilesSource({path: file.data for path, file in tree.items()} | more))


async def measure(size: int, repeats: int, files: int) -> dict[str, Any]:
    """Both ways, alternating."""
    (task,) = [task for task in load_tasks("builtin") if task.task_id == TASK]
    task = await padded(task, files)
    runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    async with skyenv.connect() as provider:
        for repeat in range(repeats + 1):
            for fork in (True, False):
                run = await one_group(provider, task, size, fork)
                if repeat:
                    runs[fork].append(run)
    found: dict[str, Any] = {}
    for fork, name in ((True, "forked"), (False, "alone")):
        for key in runs[fork][0]:
            values = [run[key] for run in runs[fork]]
            found[f"{name}.{key}"] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    for key in runs[True][0]:
        found[f"saving.{key}"] = found[f"alone.{key}"]["median"] / found[f"forked.{key}"]["median"]
    return found


def main() -> None:
    """Run and print."""
    options = parse(__doc__ or "", group=8, repeats=5, files=1000)
    report(anyio.run(measure, options.group, options.repeats, options.files), options.json)


if __name__ == "__main__":
    main()
