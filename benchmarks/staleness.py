"""What rollouts ahead of training gain: the product's scheduler over a trace of SWE tasks, in virtual time.

A run of optimizer steps on a simulated cluster whose trainer takes `train` percent of the time that a batch's rollouts
take by themselves; the samples of a task take equally long. For each staleness: hours, how much shorter than the
synchronous run, the trainer's waiting, the share of a step that rollouts ran behind training, engines idle, and how
stale what was trained on was (mean and most; never above what is allowed). Every figure is the median over several
seeds, with minimum and maximum in the JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

import anyio
from _measure import parse, report
from _simulation import RENDERER, Engines, Script, Shape, SimulatedEngine, SimulatedEnv, draw_trace, virtual

from sky_trainer.ahead import Ahead
from sky_trainer.config import RolloutConfig
from sky_trainer.curriculum import Plan, Stage
from sky_trainer.rollouts import staleness
from skyenv.rollout import TurnRules
from skyenv.types import Completion, Limits
from skyenv.vector.lanes import Stages, StageWidths
from skyenv.vector.pipeline import RolloutPipeline

GROUPS, GROUP = 8, 4
LIMITS = Limits(max_turns=1000, init_timeout=120.0, turn_timeout=240.0, eval_timeout=600.0, wall_clock=3600.0)


class Named(str):
    """A task of the simulation, which knows its tasks by their ids."""

    __slots__ = ()

    @property
    def task_id(self) -> str:
        """Itself."""
        return str(self)


class Versioned:
    """The simulated engine, which writes on completions the version that it had when it began them."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.version = 0
        self._engine = engine

    async def generate(self, *arguments: Any, session_id: str = "", **options: Any) -> Completion:
        """One generation of the trace."""
        version = self.version
        answer = await self._engine.generate(*arguments, session_id=session_id, **options)
        return Completion(answer.text, answer.token_ids, answer.logprobs, policy_version=version)


def play(allowed: int, scripts: Sequence[Script], steps: int, train: float, live: int) -> dict[str, float]:
    """One run; `train` is the seconds of an optimizer step."""
    tasks = [Named(f"t{number}") for number in range(len(scripts))]
    by_name = {task.task_id: script for task, script in zip(tasks, scripts, strict=True)}
    engines = Engines(4, 4)
    engine = Versioned(SimulatedEngine(engines, by_name))
    widths = StageWidths(live // 4, live, live // 4, live=live, most_init=live // 2, most_eval=live // 2)
    pipeline = RolloutPipeline(
        engine=engine,
        make_env=lambda: SimulatedEnv(by_name, lambda change: None),
        renderer=RENDERER,
        limits=LIMITS,
        rules=TurnRules(stuck=None),
        stages=Stages(widths),
    )
    plan = Plan([Stage(0, steps, tuple(tasks), RolloutConfig())], GROUPS, 0, steps)  # type: ignore[arg-type]
    waited, hidden, ages, most = 0.0, 0.0, list[float](), 0.0

    async def main() -> float:
        nonlocal waited, hidden, most
        started = anyio.current_time()
        async with Ahead(plan, [pipeline], GROUP, staleness=allowed).opened() as ahead:
            for number in range(steps):
                engine.version = number
                asked = anyio.current_time()
                found = (await ahead.take(number)).found
                waited += anyio.current_time() - asked
                numbers = staleness(found, number)
                ages.append(numbers["staleness/mean"])
                most = max(most, numbers["staleness/max"])
                busy = ahead.busy_seconds()
                await anyio.sleep(train)
                hidden += ahead.busy_seconds() - busy
        return float(anyio.current_time() - started)

    seconds: float = virtual(main)
    assert most <= allowed
    return {
        "hours": seconds / 3600,
        "waiting": waited / seconds,
        "hidden": hidden / seconds,
        "idle": 1 - engines.busy_seconds / (engines.slots * seconds),
        "stale_mean": statistics.fmean(ages),
        "stale_max": most,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum over the seeds."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)}


def main() -> None:
    """Run and print."""
    options = parse(__doc__ or "", steps=8, sandboxes=32, train=50, seeds=3)
    found: dict[str, Any] = {}
    runs: dict[int, list[dict[str, float]]] = {}
    for allowed in (0, 1, 2, 4):
        runs[allowed] = []
        for seed in range(options.seeds):
            scripts = draw_trace(Shape(), GROUPS * options.steps, seed)
            alone = play(0, scripts, 2, 0.0, options.sandboxes)["hours"] * 3600 / 2
            runs[allowed].append(play(allowed, scripts, options.steps, options.train / 100 * alone, options.sandboxes))
    print(f"{'staleness':>9}{'hours':>8}{'shorter':>9}{'waiting':>9}{'hidden':>8}{'idle':>7}{'mean':>7}{'most':>6}")
    for allowed, results in runs.items():
        saved = [1 - one["hours"] / first["hours"] for one, first in zip(results, runs[0], strict=True)]
        row = {name: spread([result[name] for result in results]) for name in results[0]}
        row["shorter"] = spread(saved)
        found[f"staleness_{allowed}"] = row
        m = {name: value["median"] for name, value in row.items()}
        print(
            f"{allowed:>9}{m['hours']:>8.2f}{m['shorter']:>9.1%}{m['waiting']:>9.1%}{m['hidden']:>8.1%}"
            f"{m['idle']:>7.1%}{m['stale_mean']:>7.2f}{m['stale_max']:>6.0f}"
        )
    report({name: row["shorter"] for name, row in found.items()}, False)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
