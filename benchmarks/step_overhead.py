"""What our trainer costs beside a bare TRL step: CPU seconds of optimizer steps on the same recorded rollouts.

Both trainers take their turns in pairs, in one process on one thread, on the same model, rows and options. What is
measured runs from the request for rollouts to the end of the optimizer step: the process's CPU time, in which other
work on the machine counts little, and wall time. Rollouts are handed over ready made and cost nothing on either side.
Beside the median of the pairs and its quartiles stands the ratio of the two cheapest runs, which noise can only raise.
"""

from __future__ import annotations

import copy
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _measure import parse, report

from sky_trainer import grpo, tiny
from sky_trainer.config import from_mapping
from skyenv.adapters.trl import columns
from skyenv.samples import RowRules, rows_from
from skyenv.types import Segment, StopReason, Trajectory, TrajectoryGroup, Turn

GROUPS, SIZE, TURNS = 4, 8, 6
Cost = dict[str, float]
"""Seconds a step by clock."""


class Task:
    """What a plan knows of a task."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id


class Weights:
    """Nothing to bring anywhere."""

    version = 0

    def push(self, version: int) -> None:
        """Count."""
        self.version = version


def recorded(draw: random.Random, vocab: int, length: int) -> list[TrajectoryGroup]:
    """Groups of trajectories of `TURNS` turns, of about `length` ids."""
    groups = []
    for g in range(GROUPS):
        members = []
        for s in range(SIZE):
            segment, turns = Segment(), []
            for _ in range(TURNS):
                count = length // TURNS // 2
                segment.append_context([draw.randrange(3, vocab) for _ in range(count)])
                sampled = [draw.randrange(3, vocab) for _ in range(draw.randint(count // 2, count))]
                segment.append_sampled(sampled, [-5.0] * len(sampled))
                turns.append(Turn("", (), "", "stop", 0, 0.0, 0.0))
            reward = float(draw.random() < 0.5)
            done = StopReason.FINISH
            members.append(Trajectory(f"t{g}", g, s, (), [segment], turns, reward, stop_reason=done))
        groups.append(TrajectoryGroup(f"t{g}", g, members))
    return groups


def bare(model: Any, args: Any, tokenizer: Any, groups: Sequence[TrajectoryGroup]) -> Any:
    """TRL's own trainer over the same rows, with its sampler correction on as ours has it."""
    from datasets import Dataset
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Synced:
        def sync_weights(self) -> None:
            """Nothing to bring anywhere."""

    def reward(env_reward: list[float | None], **_: Any) -> list[float | None]:
        return env_reward

    data = Dataset.from_list([{"prompt": group.task_id} for group in groups])
    rules = RowRules(tokenizer.eos_token_id, len(tokenizer))
    roll_out = lambda prompts, trainer: columns(rows_from(groups, rules))  # noqa: E731
    trainer = GRPOTrainer(
        model, reward, args=args, train_dataset=data, processing_class=tokenizer, rollout_func=roll_out
    )
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Synced(), -1
    return trainer


def main() -> None:
    """Pairs of short trainings, and the difference within each pair."""
    options = parse(__doc__ or "", pairs=8, steps=3, length=600, hidden=128)
    torch.set_num_threads(1)
    tokenizer = tiny.make_tokenizer(["word"], 300)
    model = tiny.make_model(tokenizer, options.hidden, 2, 0)
    start = copy.deepcopy(model.state_dict())
    groups = recorded(random.Random(0), len(tokenizer), options.length)
    rollout = {"group_size": SIZE, "groups_per_step": GROUPS, "max_context": 4096}

    def fresh(kind: str, out: str) -> Any:
        values = {"out": out, "steps": options.steps, "micro_batch": 4, "rollout": rollout}
        config = from_mapping({**values, "grpo": {"use_cpu": True, "save_strategy": "no"}})
        args = grpo.grpo_config(config)
        twin = copy.deepcopy(model)
        twin.load_state_dict(start)
        if kind == "bare":
            return bare(twin, args, tokenizer, groups)
        tasks, order = [Task(group.task_id) for group in groups], list(range(GROUPS)) * options.steps
        return grpo.SkyGRPOTrainer(
            twin, args=args, tasks=tasks, collect=lambda tasks, size: groups, weights=Weights(),
            processing_class=tokenizer, order=order,
        )  # fmt: skip

    found: dict[str, list[Cost]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory() as out:
        timed(fresh("bare", out).train)  # warms caches and lazy imports
        for pair in range(options.pairs):
            for kind in ("bare", "ours") if pair % 2 else ("ours", "bare"):
                found[kind].append(timed(fresh(kind, out).train, options.steps))
    report({name: compared(found, name) for name in ("cpu", "wall")}, options.json)


def compared(found: Mapping[str, Sequence[Cost]], clock: str) -> dict[str, float]:
    """Seconds a step by this clock, and by which share ours are more: median and quartiles of the pairs, cheapest."""
    bare, ours = ([cost[clock] for cost in found[kind]] for kind in ("bare", "ours"))
    shares = [more / less - 1 for more, less in zip(ours, bare, strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    return {
        "bare_seconds": statistics.median(bare),
        "our_seconds": statistics.median(ours),
        "overhead": middle,
        "overhead_q1": low,
        "overhead_q3": high,
        "overhead_of_cheapest": min(ours) / min(bare) - 1,
    }


def timed(function: Callable[[], Any], steps: int = 1) -> Cost:
    """Seconds a step of one call of so many."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return {"cpu": (time.process_time() - cpu) / steps, "wall": (time.perf_counter() - wall) / steps}


if __name__ == "__main__":
    main()
