"""The rollout pipeline against other schedulers on the same traces, in virtual time; a cluster of any size.

    python benchmarks/pipeline.py --sandboxes 1024 --engines 64 --json
    python benchmarks/pipeline.py --trace runs/mine/trajectories.jsonl      # the times of a recorded run
    python benchmarks/pipeline.py --faults 0.05 --hangs 0.01 --slow 0.1 --dead 0.25 --init 20,1.0

(a) seconds of a whole batch, engines idle, p90 of group completion, share of the bound that no schedule can beat;
(b) the same with faults and hangs, and whether a scheduler ends at all; (c) with `--growth`, processor seconds of the
pipeline at growing numbers of trajectories. Every figure is over several seeds.

The bound is the largest of: generation seconds over engine slots, behind the shortest init and before the shortest
evaluation; sandbox seconds over sandboxes; init and evaluation seconds over their widths; the longest trajectory. A
batch that ends has a ramp and a tail in it, `steady` has not: it is the share of the bottleneck's capacity in use
between the tenth and the ninetieth percent of the run. `pipeline` takes trajectories in their order, `longest_first`
is the same pipeline with the durations that other samples of the same tasks had. A scheduler has `PATIENCE` times the
bound before it counts as never ending. `lost` are trajectories without a result of their own, whether they came back
as typed failures or never. Up to 256 sandboxes a run is 16 times as many trajectories and 3 seeds; a larger one is 4
times as many, one seed and no faults, unless other numbers are given.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from _baselines import FAILURES, bounded_batch, bounded_queues, naive_batch, three_queues
from _measure import close_with, parse, report
from _simulation import RENDERER, Engines, SimulatedEngine, SimulatedEnv, virtual
from _traces import Script, Shape, described, draw_trace, recorded_groups, twin_of

from skyenv.rollout import TurnRules
from skyenv.types import Limits, Trajectory
from skyenv.vector.durations import Durations
from skyenv.vector.pipeline import RolloutPipeline, StageWidths
from skyenv.vector.stopping import FailureThreshold

PATIENCE = 20.0
LIMITS = Limits(max_turns=1000, init_timeout=300.0, turn_timeout=240.0, eval_timeout=600.0, wall_clock=36000.0)
GROWTH = (1250, 2500, 5000, 10000)
SMALL = 256


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

    def bounds(self, trace: Sequence[Script]) -> dict[str, float]:
        """Seconds that no schedule can beat on this trace, by what sets them."""
        half = max(1, self.sandboxes // 2)
        edges = min(script.init for script in trace) + min(script.evaluate for script in trace)
        return {
            "engines": edges + sum(sum(script.generate) for script in trace) / (self.engines * self.slots),
            "sandboxes": sum(script.total for script in trace) / self.sandboxes,
            "init": sum(script.init for script in trace) / half,
            "eval": sum(script.evaluate for script in trace) / half,
            "longest": max(script.total for script in trace),
        }


Scheduler = Callable[[Sequence[Script], Engines, int, Callable[[int], None]], Awaitable[None]]


async def with_pipeline(
    trace: Sequence[Script],
    engines: Engines,
    live: int,
    done: Callable[[int], None],
    history: Durations | None = None,
) -> None:
    """The product's own."""
    scripts = {f"t{index}": script for index, script in enumerate(trace)}
    pipeline = RolloutPipeline(
        engine=SimulatedEngine(engines, scripts),
        make_env=lambda: SimulatedEnv(scripts, engines.live),
        renderer=RENDERER,
        limits=limits_for(trace),
        rules=TurnRules(stuck=None),
        widths=Cluster(live, 1, 1).widths,
        failures=FailureThreshold(1.0),
        max_attempts=3,
        attempts={"RewardError": 3},
        longest_first=history,
        stall_after=1e9,
    )
    async with pipeline.run(list(scripts), 1) as run:
        async for trajectory in run:
            if trajectory.failure is None:
                done(int(trajectory.task_id[1:]))
    assert engines.live.value == 0
    assert engines.live.most <= live


def limits_for(trace: Sequence[Script]) -> Limits:
    """Deadlines that nothing in the trace reaches by itself; the baselines have none, and only hangs are to end."""
    slowest = {
        "init_timeout": max(script.init for script in trace),
        "turn_timeout": max(max(script.generate) + max(script.tool) for script in trace),
        "eval_timeout": max(script.evaluate for script in trace),
    }
    return dataclasses.replace(LIMITS, **{key: max(getattr(LIMITS, key), 2 * value) for key, value in slowest.items()})


def history_of(twin: Sequence[Script], group: int) -> Durations:
    """What is known of each trajectory's task: the mean of another group of it."""
    durations = Durations()
    for index in range(len(twin)):
        siblings = twin[index - index % group :][:group]
        known = Trajectory(f"t{index}")
        known.seconds["run"] = statistics.fmean(script.total for script in siblings)
        durations.note(known)
    return durations


BASELINES: dict[str, Scheduler] = {
    "naive_batch": naive_batch,
    "bounded_batch": bounded_batch,
    "bounded_queues": bounded_queues,
    "three_queues": three_queues,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One study: a cluster, a shape or recorded groups, so many trajectories."""

    shape: Shape
    cluster: Cluster
    count: int
    recorded: Sequence[Sequence[Script]] = ()

    def trace(self, seed: int) -> list[Script]:
        """The trajectories of a seed."""
        return draw_trace(self.shape, self.count, seed, self.recorded)

    def schedulers(self, seed: int) -> dict[str, Scheduler]:
        """Ours and the others; the longest first only where a history can be drawn."""
        ours: dict[str, Scheduler] = {"pipeline": with_pipeline}
        if not self.recorded:
            history = history_of(twin_of(self.shape, self.count, seed), self.shape.group)
            ours["longest_first"] = partial(with_pipeline, history=history)
        return ours | BASELINES


@dataclass(slots=True)
class Seen:
    """What was seen of a run, times in seconds from its begin. `levels`: the area under the use of what bounds it."""

    ended: dict[int, float] = field(default_factory=dict)
    levels: list[tuple[float, float]] = field(default_factory=list)
    finished: bool = False
    seconds: float = 0.0


async def observe(
    run: Callable[[Callable[[int], None]], Awaitable[None]],
    engines: Engines,
    dead: float,
    seed: int,
    bounds: tuple[str, float],
) -> Seen:
    """Watch `run` until its end, or until it has taken far longer than what bounds it (a name and seconds)."""
    started, (bottleneck, bound) = anyio.current_time(), bounds
    seen, used = Seen(), engines.busy if bottleneck == "engines" else engines.live

    def done(index: int) -> None:
        seen.ended[index] = anyio.current_time() - started

    async def watch() -> None:
        while True:
            seen.levels.append((anyio.current_time() - started, used.area()))
            await anyio.sleep(bound / 200)

    try:
        async with anyio.create_task_group() as beside:
            beside.start_soon(watch)
            beside.start_soon(engines.die, dead, seed, bound / 2)
            with anyio.move_on_after(PATIENCE * bound):
                await run(done)
                seen.finished = True
            beside.cancel_scope.cancel()
    except* FAILURES:
        pass
    seen.seconds = anyio.current_time() - started
    return seen


def play(scheduler: Scheduler, case: Case, seed: int) -> dict[str, float]:
    """One scheduler on one trace."""
    trace, cluster = case.trace(seed), case.cluster
    engines = Engines(cluster.engines, cluster.slots)
    bottleneck, bound = max(cluster.bounds(trace).items(), key=lambda item: item[1])

    async def main() -> tuple[Seen, float]:
        run = partial(scheduler, trace, engines, cluster.sandboxes)
        return await observe(run, engines, case.shape.dead, seed, (bottleneck, bound)), engines.busy.area()

    cpu = time.process_time()
    seen, busy = virtual(main)
    cpu = time.process_time() - cpu
    ended, seconds = seen.ended, seen.seconds
    size = case.shape.group
    groups = [
        [ended.get(i, float("inf")) for i in range(g, min(g + size, case.count))] for g in range(0, case.count, size)
    ]
    completion = sorted(max(group) for group in groups)
    capacity = engines.slots if bottleneck == "engines" else cluster.sandboxes
    return {
        "seconds": seconds,
        "ends": float(seen.finished),
        "lost": float(case.count - len(ended)),
        "share_of_bound": bound / seconds if len(ended) == case.count else 0.0,
        "steady": steady_share(seen.levels, seconds, capacity),
        "engine_idle": 1.0 - busy / (engines.slots * seconds),
        "group_p90": completion[int(0.9 * (len(completion) - 1))],
        "per_hour": 3600.0 * len(ended) / seconds,
        "most_live": float(engines.live.most),
        "cpu_seconds": cpu,
    }


def steady_share(levels: Sequence[tuple[float, float]], seconds: float, capacity: int) -> float:
    """Share of the capacity in use between the tenth and the ninetieth percent of a run."""
    inside = [(at, area) for at, area in levels if 0.1 * seconds <= at <= 0.9 * seconds]
    if len(inside) < 2:
        return 0.0
    (first, before), (last, after) = inside[0], inside[-1]
    return (after - before) / (capacity * (last - first))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum over the seeds."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)}


def compare(case: Case, seeds: int) -> dict[str, Any]:
    """All schedulers on the same traces: their figures, and how much faster the pipeline was, longest first or not."""
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        for name, scheduler in case.schedulers(seed).items():
            runs.setdefault(name, []).append(play(scheduler, case, seed))
    found: dict[str, Any] = {}
    for name, results in runs.items():
        found[name] = {key: spread([run[key] for run in results]) for key in results[0]}
        for ours in ("pipeline", "longest_first"):
            if ours in runs and name in BASELINES:
                pairs = zip(runs[ours], results, strict=True)
                faster = [run["per_hour"] and mine["per_hour"] / run["per_hour"] for mine, run in pairs]
                found[name][f"{ours}_is_faster"] = spread(faster)
    return found


COLUMNS = (
    ("hours", lambda m: f"{m['seconds'] / 3600:.2f}"),
    ("of bound", lambda m: f"{m['share_of_bound']:.1%}"),
    ("steady", lambda m: f"{m['steady']:.1%}"),
    ("idle", lambda m: f"{m['engine_idle']:.1%}"),
    ("group p90 h", lambda m: f"{m['group_p90'] / 3600:.2f}"),
    ("per hour", lambda m: f"{m['per_hour']:.0f}"),
    ("lost", lambda m: f"{m['lost']:.0f}"),
    ("most live", lambda m: f"{m['most_live']:.0f}"),
    ("ends", lambda m: "yes" if m["ends"] else "no"),
    ("ours is", lambda m: f"{m['pipeline_is_faster']:.2f}x" if m.get("pipeline_is_faster") else ""),
)


def show(title: str, found: dict[str, Any]) -> None:
    """A table of medians."""
    print(f"\n{title}")
    print(f"{'':16}" + "".join(f"{name:>12}" for name, _ in COLUMNS))
    for name, row in found.items():
        medians = {key: value["median"] for key, value in row.items()}
        print(f"{name:16}" + "".join(f"{form(medians):>12}" for _, form in COLUMNS), flush=True)


def growth(case: Case) -> dict[str, dict[str, float]]:
    """Processor seconds of the pipeline, in all and a trajectory, at growing numbers of them; one in ten fails once."""
    found = {}
    for count in GROWTH:
        larger = dataclasses.replace(case, count=count)
        cpu = play(with_pipeline, larger, 0)["cpu_seconds"]
        found[f"growth.{count}"] = {"cpu_seconds": cpu, "ms_a_trajectory": 1000 * cpu / count}
    return found


def pair(text: str, kind: type[int] | type[float] = float) -> Any:
    """Two numbers with a comma between them."""
    first, _, second = text.partition(",")
    return kind(first), kind(second)


def case_of(options: argparse.Namespace) -> Case:
    """What the command line asks for."""
    cluster = Cluster(options.sandboxes, options.engines, options.slots)
    shape = Shape(
        pair(options.init),
        pair(options.generate),
        pair(options.tool),
        pair(options.evaluate),
        pair(options.turns, int),
        unlike=options.unlike,
        group=options.group,
        faults=options.faults,
        hangs=options.hangs,
        slow=options.slow,
        dead=options.dead,
    )
    recorded = recorded_groups(Path(options.trace)) if options.trace else ()
    waves = 16 if options.sandboxes <= SMALL else 4
    return Case(shape, cluster, options.trajectories or waves * options.sandboxes, recorded)


def main() -> None:
    """Run and print."""
    options = parse(
        (__doc__ or "").partition("\n")[0],
        **{"sandboxes": 64, "engines": 4, "slots": 8, "trajectories": 0, "seeds": 0, "group": 8, "trace": ""},
        **{"init": "8,0.6", "generate": "6,0.7", "tool": "0.8,1.2", "evaluate": "25,0.7", "turns": "5,35"},
        **{"unlike": 0.25, "faults": 0.0, "hangs": 0.0, "slow": 0.0, "dead": 0.0, "scenarios": 1, "growth": 0},
    )
    case = case_of(options)
    seeds = options.seeds or (3 if options.sandboxes <= SMALL else 1)
    print("trace of seed 0:", {name: round(value, 1) for name, value in described(case.trace(0)).items()})
    print("bounds of seed 0:", {name: round(value) for name, value in case.cluster.bounds(case.trace(0)).items()})
    clean = compare(case, seeds)
    show(f"{case.count} trajectories on {case.cluster}", clean)
    faulty: dict[str, Any] = {}
    if options.scenarios and options.sandboxes <= SMALL:
        for faults, hangs in ((0.01, 0.0), (0.05, 0.0), (0.10, 0.0), (0.10, 0.01)):
            shape = dataclasses.replace(case.shape, faults=faults, hangs=hangs)
            name = f"faults {faults:.0%}, hangs {hangs:.0%}"
            faulty[name] = compare(dataclasses.replace(case, shape=shape, count=case.count // 2), seeds)
            show(name, faulty[name])
    grown = (
        growth(dataclasses.replace(case, shape=dataclasses.replace(case.shape, faults=0.1))) if options.growth else {}
    )
    best = "longest_first" if "longest_first" in clean else "pipeline"
    closing = {
        "share_of_bound": clean[best]["share_of_bound"],
        "share_of_bound_in_order": clean["pipeline"]["share_of_bound"],
        "steady_share": clean["pipeline"]["steady"],
        "vs_naive": clean["naive_batch"]["pipeline_is_faster"],
        "vs_bounded_batch": clean["bounded_batch"]["pipeline_is_faster"],
        "vs_bounded_queues": clean["bounded_queues"]["pipeline_is_faster"],
        "vs_three_queues": clean["three_queues"]["pipeline_is_faster"],
    }
    report(closing | grown, False)
    if options.json:
        close_with({"clean": clean, "faults": faulty, "growth": grown, **closing})


if __name__ == "__main__":
    main()
