"""The rollout pipeline on real sandboxes, tools and grader; only the engine is scripted, its latency stated.

(c) Seconds of one plan of SWE trajectories by the pipeline, by a naive batch and by a bounded batch of coroutines, in
turns and over several seeds. The bound is the largest of: generation seconds over engine slots; the processor time
that the cheapest of the three needed over the machine's cores; the generations of the longest trajectory, one after the
other. A plan that ends has a tail in which fewer trajectories are left than the engine has slots: `share_of_plan`
compares with the plan itself, played in its order with as many alive, where all but generations takes no time. `others`
is how many cores other programs used meanwhile: neither knows of them.

(d) Processor time a turn and memory with 10, 100 and 1 000 live trajectories of one process, each with a sandbox of its
own on a node server beside it: in all, in this process (pipeline, renderer, client), in the node server, and below it
(shells and commands). Every trajectory is through init before the first may go on, so that all are alive; what is
counted lies between that moment and the one in which all have done their turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from _measure import report
from _processes import TOKEN, processes_below, proportional_bytes, server
from _real import (
    RENDERER,
    PlannedEngine,
    Sample,
    bounded_batch,
    counted,
    draw_plan,
    env_of,
    longest,
    machine_seconds,
    naive_batch,
    seconds_of_generations,
)

import skyenv
from skyenv.core import Sandbox, SandboxProvider
from skyenv.engines.scripted import ScriptedEngine
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.validation import reference_patch
from skyenv.envs.tool_env import ToolEnv
from skyenv.rollout import TurnRules
from skyenv.types import Limits, Message, SamplingParams, ToolCall
from skyenv.vector.metrics import Meter
from skyenv.vector.pipeline import RolloutPipeline, StageWidths
from skyenv.vector.timeline import TimelineFile

CORES = len(os.sched_getaffinity(0))
LIMITS = Limits(max_turns=1000, max_tokens_per_turn=1 << 20, max_context=1 << 24)


async def with_pipeline(plan: Sequence[Sample], provider: SandboxProvider, engine: PlannedEngine, live: int) -> Meter:
    """The product's own; its meter."""
    meter = Meter(engine_slots=engine.slots, timeline=True)
    pipeline = RolloutPipeline(
        engine=engine,
        make_env=lambda: env_of(plan, provider),
        renderer=RENDERER,
        limits=LIMITS,
        sampling=SamplingParams(max_tokens=1 << 20),
        rules=TurnRules(stuck=None),
        widths=StageWidths(init=2 * CORES, run=live, eval=2 * CORES, live=live),
        meter=meter,
    )
    tasks = list(dict.fromkeys(sample.task for sample in plan))
    solves = {(sample.task.task_id, sample.index): sample.solves for sample in plan}
    async with pipeline.run(tasks, len(plan) // len(tasks)) as run:
        async for trajectory in run:
            expected = float(solves[trajectory.task_id, trajectory.sample_index])
            assert trajectory.reward == expected, (trajectory.failure, trajectory.verdict)
    return meter


Scheduler = Callable[[Sequence[Sample], SandboxProvider, PlannedEngine, int], Awaitable[Meter | None]]
SCHEDULERS: dict[str, Scheduler] = {
    "pipeline": with_pipeline,
    "bounded_batch": bounded_batch,
    "naive_batch": naive_batch,
}


async def play(
    name: str, plan: Sequence[Sample], options: argparse.Namespace, used: Callable[[], float]
) -> dict[str, Any]:
    """One scheduler, with a node server of its own."""
    engine = PlannedEngine(plan, options.slots)
    async with skyenv.connect() as provider:
        env = env_of(plan, provider)  # what siblings share (wheels, environments) is prepared before
        for task in dict.fromkeys(sample.task for sample in plan):
            await env.areset(options={"task": task})
        await env.aclose()
        before, whole, started = used(), machine_seconds(), time.perf_counter()
        meter = await SCHEDULERS[name](plan, provider, engine, options.live)
        seconds = time.perf_counter() - started
        cpu, others = used() - before, machine_seconds() - whole
    if meter is not None and options.timeline is not None:
        TimelineFile(options.timeline).append(meter.take_lifelines(), meter.origin)
        options.timeline = None
    generating = sum(sum(sample.latencies) for sample in plan)
    busy = generating / options.slots / seconds
    return {"seconds": seconds, "cpu": cpu, "others": max(0.0, others - cpu) / seconds, "engine_busy": busy}


async def compare(options: argparse.Namespace, used: Callable[[], float]) -> dict[str, Any]:
    """All schedulers in turns on the same plans: shares of the bound, and how much faster the pipeline was."""
    tasks = load_tasks("builtin")[: options.tasks]
    async with skyenv.connect() as provider:
        patches = {task.task_id: await reference_patch(task, provider) for task in tasks}
    rounds, wanted = [], options.schedulers.split(",")
    for seed in range(options.seeds):
        plan = draw_plan(tasks, patches, options.samples, options.latency, seed)
        names = wanted[seed % len(wanted) :] + wanted[: seed % len(wanted)]
        runs = {name: await play(name, plan, options, used) for name in names}
        engine = max(sum(sum(s.latencies) for s in plan) / options.slots, longest(plan))
        alone = await anyio.to_thread.run_sync(seconds_of_generations, plan, options.slots, options.live)
        cpu = min(run["cpu"] for run in runs.values())
        for run in runs.values():
            run["share_of_bound"] = max(engine, cpu / CORES) / run["seconds"]
            run["share_of_plan"] = alone / run["seconds"]
        rounds.append(runs)
        print(json.dumps({"seed": seed, "engine_bound": engine, "plan": alone, "cpu_bound": cpu / CORES, **runs}))
    found: dict[str, Any] = {
        name: {key: spread([runs[name][key] for runs in rounds]) for key in rounds[0][name]} for name in wanted
    }
    for name in [name for name in wanted if name != "pipeline"] if "pipeline" in wanted else []:
        found[f"vs_{name}"] = spread([runs[name]["seconds"] / runs["pipeline"]["seconds"] for runs in rounds])
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)}


@dataclass(frozen=True, slots=True)
class Chore:
    """A task of `ChoreEnv`."""

    task_id: str


class ChoreEnv(ToolEnv[Chore]):
    """A sandbox and a shell: as little environment as there can be around real commands."""

    def __init__(self, provider: SandboxProvider) -> None:
        super().__init__((Chore("chore"),), "strict", max_turns=10_000)
        self._provider = provider

    async def begin(self, task: Chore, resources: AsyncExitStack) -> Sandbox | None:
        """One sandbox."""
        return await resources.enter_async_context(self._provider.sandbox())

    def instructions(self, task: Chore) -> tuple[Message, ...]:
        """Two messages."""
        return (Message("system", "You work in a shell."), Message("user", f"Do {task.task_id}."))

    async def grade(self, task: Chore, sandbox: Sandbox | None) -> tuple[float | None, dict[str, Any]]:
        """Whether the work is there."""
        assert sandbox is not None
        result = await sandbox.exec("test -f /tmp/work")
        return float(result.exit_code == 0), {"resolved": result.exit_code == 0}


class Together:
    """An engine that answers no first and no last request before all `count` trajectories have asked for theirs.

    In both moments `note` is called: first and last turns are the same for all, and what lies between is turns alone.
    """

    def __init__(self, engine: ScriptedEngine, count: int, turns: int, note: Callable[[str], None]) -> None:
        self._engine, self._note = engine, note
        self._left = {0: count, turns: count}
        self._gates = {turn: anyio.Event() for turn in self._left}

    async def generate(self, *args: Any, messages: Sequence[Message] = (), **options: Any) -> Any:
        """Wait for the others where all must be there."""
        turn = sum(message.role == "assistant" for message in messages)
        if turn in self._gates:
            self._left[turn] -= 1
            if not self._left[turn]:
                self._note("turned" if turn else "full")
                self._gates[turn].set()
            await self._gates[turn].wait()
        return await self._engine.generate(*args, messages=messages, **options)


async def live(count: int, turns: int, latency: float, used: Callable[[], float]) -> dict[str, Any]:
    """`count` trajectories at once, `turns` commands each."""
    commands = [f"echo {turn} >> /tmp/work; ls /usr | head" for turn in range(turns)]
    texts = [RENDERER.format.render_call(ToolCall("execute_bash", {"command": command})) for command in commands]
    script = [*texts, RENDERER.format.render_call(ToolCall("finish", {}))]
    arguments = ("serve", "--port", "0", "--token", TOKEN, "--backend", "local", "--slots", str(count + 8))
    with server(*arguments) as (url, pid):
        async with skyenv.connect(url, TOKEN, patience=300.0) as provider:
            marks: dict[str, Any] = {"empty": weigh(pid, used)}
            scripted = ScriptedEngine(RENDERER, script, latency=latency)
            engine = Together(scripted, count, turns, lambda mark: marks.update({mark: weigh(pid, used)}))
            meter = Meter()
            pipeline = RolloutPipeline(
                engine=engine,
                make_env=lambda: ChoreEnv(provider),
                renderer=RENDERER,
                limits=Limits(max_turns=10_000, max_context=1 << 20, turn_timeout=3600.0),
                rules=TurnRules(stuck=None),
                widths=StageWidths(init=8, run=count, eval=8, live=count),
                meter=meter,
            )
            async with pipeline.run(["chore"] * count, 1) as run:
                async for trajectory in run:
                    assert trajectory.reward == 1.0, trajectory.failure
            numbers = meter.numbers()
    assert int(numbers["trajectories/done"]) == int(numbers["sandboxes/live_max"]) == count
    empty, full, turned = marks["empty"], marks["full"], marks["turned"]
    spent = {key: turned[key] - full[key] for key in ("driver", "node", "below")}
    each = {f"cpu_ms_per_turn_{key}": 1000 * value / (count * turns) for key, value in spent.items()}
    return {
        "live": count,
        "turns": turns * count,
        "cpu_ms_per_turn": sum(each.values()),
        **each,
        "driver_bytes_per_trajectory": (full["driver_bytes"] - empty["driver_bytes"]) / count,
        "node_bytes_per_trajectory": (full["node_bytes"] - empty["node_bytes"]) / count,
        "turns_per_second": turns * count / (turned["at"] - full["at"]),
    }


def weigh(node: int, used: Callable[[], float]) -> dict[str, float]:
    """Processor seconds and bytes (PSS) of this process, of the node server, and of what runs below it."""
    gc.collect()
    own, below = [os.getpid()], [pid for pid in processes_below(node) if pid != node]
    fields = Path(f"/proc/{node}/stat").read_bytes().rpartition(b")")[2].split()
    alone = sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    driver = time.process_time()
    return {
        "at": time.perf_counter(),
        "driver": driver,
        "node": alone,
        "below": used() - driver - alone,
        "driver_bytes": float(proportional_bytes(own)),
        "node_bytes": float(proportional_bytes([node, *below])),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--tasks", type=int, default=12, help="tasks of the builtin set (default 12)")
    parser.add_argument("--samples", type=int, default=4, help="samples of each (default 4)")
    parser.add_argument("--seeds", type=int, default=3, help="plans (default 3)")
    parser.add_argument("--live", type=int, default=16, help="sandboxes alive at once (default 16)")
    parser.add_argument("--slots", type=int, default=8, help="requests that the engine serves at once (default 8)")
    parser.add_argument("--latency", type=float, default=0.5, help="median of a generation in seconds (default 0.5)")
    parser.add_argument("--schedulers", default=",".join(SCHEDULERS), help="default all three")
    parser.add_argument("--timeline", type=Path, help="keep the pipeline's first run, for `sky_trainer timeline`")
    parser.add_argument("--sizes", default="10,100,1000", help="live trajectories of (d) (default 10,100,1000)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each in (d) (default 5)")
    options = parser.parse_args()
    with counted() as used:
        results = measure(options, used)
    if options.json:
        machine = {"cpus": CORES, "load": os.getloadavg()[0], "kernel": platform.release()}
        print(json.dumps({**results_as_rows(results), "machine": machine}))


def measure(options: argparse.Namespace, used: Callable[[], float]) -> dict[str, Any]:
    """All figures, printed as they come."""
    results: dict[str, Any] = {}
    if options.seeds:
        results |= {"rollouts": anyio.run(compare, options, used)}
        for name, values in results["rollouts"].items():
            report(
                {f"{name}: {key}": value for key, value in values.items()} if name in SCHEDULERS else {name: values},
                False,
            )
    for size in [int(word) for word in options.sizes.split(",") if word]:
        # a request every 20 ms, so that the cores are never the limit
        results[f"live_{size}"] = anyio.run(live, size, options.turns, max(0.2, size * 0.02), used)
        report({f"live {size}: {key}": float(value) for key, value in results[f"live_{size}"].items()}, False)
    return results


def results_as_rows(results: Mapping[str, Any]) -> dict[str, Any]:
    """What the last line holds: everything, and the figures of the headline at the top."""
    if "rollouts" not in results:
        return dict(results)
    ours = results["rollouts"]["pipeline"]
    keys = ("share_of_bound", "share_of_plan", "engine_busy")
    return {
        **{key: ours[key] for key in keys},
        **results["rollouts"],
        **{k: v for k, v in results.items() if k != "rollouts"},
    }


if __name__ == "__main__":
    main()
