"""The rollout pipeline against other schedulers on the same traces, in virtual time; a cluster of any size.

(a) seconds of a whole batch, engines idle, p90 of group completion, share of the bound that no schedule can beat;
(b) the same with faults and hangs, and whether a scheduler ends at all. Every figure is over several seeds. The bound
is the largest of: generation seconds over engine slots, sandbox seconds over sandboxes, init and evaluation over their
widths. A scheduler has `PATIENCE` times the bound before it counts as never ending.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
from _baselines import FAILURES, bounded_batch, naive_batch, three_queues
from _measure import parse, report
from _simulation import RENDERER, Engines, Script, Shape, SimulatedEngine, SimulatedEnv, draw_trace, virtual

from skyenv.rollout import TurnRules
from skyenv.types import Limits
from skyenv.vector.pipeline import RolloutPipeline, StageWidths
from skyenv.vector.stopping import FailureThreshold

GROUP = 8
PATIENCE = 20.0
LIMITS = Limits(max_turns=1000, init_timeout=120.0, turn_timeout=240.0, eval_timeout=600.0, wall_clock=3600.0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Sandboxes alive at once, engines, and sequences an engine serves at once."""

    sandboxes: int
    engines: int
    slots: int

    @property
    def widths(self) -> StageWidths:
        """Init and evaluation may each use a quarter of the sandboxes, and up to half under load."""
        quarter, half = max(1, self.sandboxes // 4), max(1, self.sandboxes // 2)
        return StageWidths(quarter, self.sandboxes, quarter, live=self.sandboxes, most_init=half, most_eval=half)

    def bound(self, trace: Sequence[Script]) -> float:
        """Seconds that no schedule can beat on this trace."""
        half = max(1, self.sandboxes // 2)
        return max(
            sum(sum(script.generate) for script in trace) / (self.engines * self.slots),
            sum(script.total for script in trace) / self.sandboxes,
            sum(script.init for script in trace) / half,
            sum(script.evaluate for script in trace) / half,
            max(script.total for script in trace),
        )


Scheduler = Callable[[Sequence[Script], Engines, int, Callable[[int], None]], Awaitable[None]]


async def with_pipeline(trace: Sequence[Script], engines: Engines, live: int, done: Callable[[int], None]) -> None:
    """The product's own."""
    scripts = {f"t{index}": script for index, script in enumerate(trace)}
    alive = peak = 0

    def count(change: int) -> None:
        nonlocal alive, peak
        alive += change
        peak = max(peak, alive)

    pipeline = RolloutPipeline(
        engine=SimulatedEngine(engines, scripts),
        make_env=lambda: SimulatedEnv(scripts, count),
        renderer=RENDERER,
        limits=LIMITS,
        rules=TurnRules(stuck=None),
        widths=Cluster(live, 1, 1).widths,
        failures=FailureThreshold(1.0),
        max_attempts=3,
    )
    async with pipeline.run(list(scripts), 1) as run:
        async for trajectory in run:
            done(int(trajectory.task_id[1:]))
    assert alive == 0
    assert peak <= live


SCHEDULERS: dict[str, Scheduler] = {
    "pipeline": with_pipeline,
    "naive_batch": naive_batch,
    "bounded_batch": bounded_batch,
    "three_queues": three_queues,
}


def play(name: str, shape: Shape, cluster: Cluster, count: int, seed: int) -> dict[str, Any]:
    """One scheduler on one trace."""
    trace = draw_trace(shape, count, seed)
    engines, bound = Engines(cluster.engines, cluster.slots), cluster.bound(trace)
    ended: dict[int, float] = {}
    finished = False

    async def main() -> float:
        nonlocal finished
        started = anyio.current_time()
        try:
            with anyio.move_on_after(PATIENCE * bound):
                done = lambda index: ended.__setitem__(index, anyio.current_time() - started)  # noqa: E731
                await SCHEDULERS[name](trace, engines, cluster.sandboxes, done)
                finished = True
        except* FAILURES:
            pass
        return anyio.current_time() - started

    seconds = virtual(main)
    groups = [[ended.get(i, float("inf")) for i in range(g, min(g + GROUP, count))] for g in range(0, count, GROUP)]
    completion = sorted(max(group) for group in groups)
    return {
        "seconds": seconds,
        "ends": finished and len(ended) == count,
        "share_of_bound": bound / seconds if len(ended) == count else 0.0,
        "engine_idle": 1.0 - engines.busy_seconds / (engines.slots * seconds),
        "group_p90": completion[int(0.9 * (len(completion) - 1))],
        "per_hour": 3600.0 * len(ended) / seconds,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum over the seeds."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)}


def compare(shape: Shape, cluster: Cluster, count: int, seeds: int) -> dict[str, Any]:
    """All schedulers on the same traces: their figures, and how much faster the pipeline was."""
    runs = {name: [play(name, shape, cluster, count, seed) for seed in range(seeds)] for name in SCHEDULERS}
    ours = runs["pipeline"]
    found: dict[str, Any] = {}
    for name, results in runs.items():
        found[name] = {key: spread([float(run[key]) for run in results]) for key in results[0]}
        if name != "pipeline":
            faster = [
                run["per_hour"] and mine["per_hour"] / run["per_hour"] for mine, run in zip(ours, results, strict=True)
            ]
            found[name]["pipeline_is_faster"] = spread(faster)
    return found


COLUMNS = (
    ("hours", lambda m: f"{m['seconds'] / 3600:.2f}"),
    ("of bound", lambda m: f"{m['share_of_bound']:.1%}"),
    ("idle", lambda m: f"{m['engine_idle']:.1%}"),
    ("group p90 h", lambda m: f"{m['group_p90'] / 3600:.2f}"),
    ("per hour", lambda m: f"{m['per_hour']:.0f}"),
    ("ends", lambda m: f"{m['ends']:.0f}"),
    ("ours is", lambda m: f"{m['pipeline_is_faster']:.2f}x" if "pipeline_is_faster" in m else ""),
)


def show(title: str, found: dict[str, Any]) -> None:
    """A table of medians."""
    print(f"\n{title}")
    print(f"{'':16}" + "".join(f"{name:>13}" for name, _ in COLUMNS))
    for name, row in found.items():
        medians = {key: value["median"] for key, value in row.items() if value is not None}
        print(f"{name:16}" + "".join(f"{form(medians):>13}" for _, form in COLUMNS))


def main() -> None:
    """Run and print."""
    options = parse(__doc__ or "", trajectories=1024, sandboxes=128, engines=8, slots=8, seeds=3)
    cluster = Cluster(options.sandboxes, options.engines, options.slots)
    clean = compare(Shape(), cluster, options.trajectories, options.seeds)
    show(f"no faults, {options.trajectories} trajectories, {cluster}", clean)
    faulty = {}
    for faults, hangs in ((0.01, 0.0), (0.05, 0.0), (0.10, 0.0), (0.10, 0.01)):
        shape = dataclasses.replace(Shape(), faults=faults, hangs=hangs)
        name = f"faults {faults:.0%}, hangs {hangs:.0%}"
        faulty[name] = compare(shape, cluster, options.trajectories, options.seeds)
        show(name, faulty[name])
    results = {
        "clean": clean,
        "faults": faulty,
        "share_of_bound": clean["pipeline"]["share_of_bound"],
        "vs_naive": clean["naive_batch"]["pipeline_is_faster"],
        "vs_bounded_batch": clean["bounded_batch"]["pipeline_is_faster"],
        "vs_three_queues": clean["three_queues"]["pipeline_is_faster"],
    }
    report({key: results[key] for key in ("share_of_bound", "vs_naive", "vs_bounded_batch", "vs_three_queues")}, False)
    if options.json:
        report(results, True)


if __name__ == "__main__":
    main()
