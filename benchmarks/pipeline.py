"""What overlapping init | run | eval gains, on simulated stage times with long tails.

The baseline in the same process and minute is the lock-step batch: all inits, then all runs, then all evaluations,
each with the same widths. The bound is the busy time of the slowest stage over its width; `vs_bound` 1.0 would be
perfect. Every figure is a ratio of wall seconds over several seeds; durations are scaled down and slept for real.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
from _measure import parse, report

import skyenv
from skyenv.core import Env
from skyenv.engines.scripted import ScriptedEngine
from skyenv.renderer import ByteTokenizer
from skyenv.types import Limits, Message, Step, ToolCall, ToolSpec
from skyenv.vector.pipeline import StageWidths

WIDTHS = StageWidths(init=8, run=16, eval=8, live=40)
FINISH = ToolSpec("finish", "End.", {"type": "object", "properties": {}})


class SleepingEnv(Env):
    """An environment whose stages take given times; the run stage is one call."""

    tools = (FINISH,)
    prompt = (Message("user", "Finish."),)

    def __init__(self, seconds: Mapping[str, tuple[float, float, float]]) -> None:
        self._known = seconds
        self._seconds = (0.0, 0.0, 0.0)

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._seconds = self._known[(options or {})["task"]]
        await anyio.sleep(self._seconds[0])
        return "ready", {}

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        await anyio.sleep(self._seconds[1])
        return Step("", 0.0, True, False, {})

    async def aevaluate(self) -> tuple[float | None, dict[str, Any]]:
        await anyio.sleep(self._seconds[2])
        return 1.0, {}

    async def aclose(self) -> None:
        return None


def stage_times(tasks: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Seconds of init, run and eval for each task: log-normal, the run stage with the longest tail."""
    chosen = random.Random(seed)
    draw = lambda median, sigma: median * chosen.lognormvariate(0.0, sigma)  # noqa: E731
    return {f"task{i}": (draw(0.05, 0.4), draw(0.15, 0.8), draw(0.06, 0.5)) for i in range(tasks)}


async def with_pipeline(seconds: Mapping[str, tuple[float, float, float]]) -> None:
    """The product's pipeline."""
    format = skyenv.formats.get("codeact")
    renderer = skyenv.Renderer(ByteTokenizer(), format)
    pipeline = skyenv.RolloutPipeline(
        engine=ScriptedEngine(renderer, [format.render_call(ToolCall("finish", {}))]),
        renderer=renderer,
        make_env=lambda: SleepingEnv(seconds),
        limits=Limits(max_turns=2),
        widths=WIDTHS,
    )
    async for trajectory in pipeline.run(list(seconds), group_size=1):
        assert trajectory.reward == 1.0, trajectory.failure


async def lock_step(seconds: Mapping[str, tuple[float, float, float]]) -> None:
    """All inits, then all runs, then all evaluations."""
    for stage, width in enumerate((WIDTHS.init, WIDTHS.run, WIDTHS.eval)):
        limiter = anyio.CapacityLimiter(width)

        async def one(duration: float, limiter: anyio.CapacityLimiter = limiter) -> None:
            async with limiter:
                await anyio.sleep(duration)

        async with anyio.create_task_group() as group:
            for durations in seconds.values():
                group.start_soon(one, durations[stage])


def bound(seconds: Mapping[str, tuple[float, float, float]]) -> float:
    """Busy seconds of the slowest stage over its width."""
    widths = (WIDTHS.init, WIDTHS.run, WIDTHS.eval)
    return max(sum(item[stage] for item in seconds.values()) / width for stage, width in enumerate(widths))


async def wall(work: Callable[[Mapping[str, tuple[float, float, float]]], Awaitable[None]], seconds: Any) -> float:
    """Wall seconds of one run."""
    start = time.perf_counter()
    await work(seconds)
    return time.perf_counter() - start


def ratios(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    ordered = sorted(values)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1], "n": len(ordered)}


async def measure(tasks: int, seeds: int) -> dict[str, Any]:
    """Ratios over seeds, the two ways in turn."""
    gain, above = [], []
    for seed in range(seeds):
        seconds = stage_times(tasks, seed)
        overlapped, batched = await wall(with_pipeline, seconds), await wall(lock_step, seconds)
        gain.append(batched / overlapped)
        above.append(overlapped / bound(seconds))
    return {"lock_step_vs_pipeline": ratios(gain), "pipeline_vs_bound": ratios(above)}


if __name__ == "__main__":
    options = parse(__doc__ or "", tasks=256, seeds=5)
    report(anyio.run(measure, options.tasks, options.seeds), options.json)
