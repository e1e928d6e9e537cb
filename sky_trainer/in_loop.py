"""Evaluation while training: the policy as it is after a step, on tasks of its own, beside the rollouts that go on.

It uses the engine and the slots of training and goes before it. Its transcripts are in `evaluation.jsonl`, each marked
with its step, from which an evaluation that was cut short goes on; what each came to is in `evaluations.jsonl`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import anyio

from sky_trainer.config import EvaluationConfig
from sky_trainer.evaluated import append_sample, read_samples
from sky_trainer.evaluation import missing_samples
from sky_trainer.files import read_lines
from sky_trainer.record import EVALUATIONS, RunRecord
from sky_trainer.rollouts import call
from sky_trainer.scores import scores
from skyenv.envs.swe.tasks import SweTask
from skyenv.types import Trajectory

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from skyenv.vector.pipeline import RolloutPipeline

SAMPLES, BEST = "evaluation.jsonl", "best"
FIRST = 1
"""Priority of evaluation over training."""


def is_due(config: EvaluationConfig, step: int) -> bool:
    """Whether the policy after this step is to be evaluated."""
    return config.at_start if step == 0 else step % config.every == 0


class InLoop:
    """Evaluates on the portal's loop with `pipeline`, whose limits and sampling are the evaluation's own."""

    def __init__(
        self,
        config: EvaluationConfig,
        tasks: Sequence[SweTask],
        pipeline: RolloutPipeline,
        portal: BlockingPortal,
        record: RunRecord,
    ) -> None:
        self._config, self._tasks, self._pipeline, self._portal = config, tasks, pipeline, portal
        self._record = record
        self._numbers: dict[str, float] = {}

    @property
    def best(self) -> Path:
        """Where the best policy is kept."""
        return self._record.run_dir / BEST

    def due(self, step: int) -> bool:
        """Whether the policy after this step is to be evaluated."""
        return is_due(self._config, step)

    def run(self, step: int) -> bool:
        """Evaluate the policy that the engine samples from now. Returns whether it is the best so far."""
        started = time.monotonic()
        samples = call(self._portal, self._play, step)
        result = {**scores(samples, self._config.samples), "reward": _mean_reward(samples)}
        result["seconds_in_all"] = round(time.monotonic() - started, 3)
        before = [_score(row) for row in read_lines(self._record.run_dir / EVALUATIONS) if row["step"] != step]
        self._record.evaluation(step, result)
        passes = {name: value for name, value in result.items() if name.startswith("pass@")}
        self._numbers = {
            "eval/resolved_rate": result["resolved_rate"],
            "eval/reward": result["reward"],
            "eval/failed": fmean(sample.failure is not None for sample in samples),
            "eval/seconds": result["seconds_in_all"],
            **{f"eval/{name}": value for name, value in passes.items()},
        }
        return all(_score(result) > score for score in before)

    def numbers(self) -> dict[str, float]:
        """What the evaluation since the last call came to."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    async def _play(self, step: int) -> list[Trajectory]:
        path, mark = self._record.run_dir / SAMPLES, f"step {step}"
        kept = await anyio.to_thread.run_sync(read_samples, path, mark) if path.exists() else []
        every = {(s.task_id, s.sample_index): s for s in kept if s.failure is None}
        for samples, tasks in missing_samples(self._tasks, self._config.samples, every):
            async with self._pipeline.run(tasks, len(samples), priority=FIRST) as run:
                async for trajectory in run:
                    sample = dataclasses.replace(trajectory, sample_index=samples[trajectory.sample_index])
                    every[sample.task_id, sample.sample_index] = sample
                    await anyio.to_thread.run_sync(append_sample, path, sample, mark)
        asked = [(task.task_id, index) for task in self._tasks for index in range(self._config.samples)]
        return [every[sample] for sample in asked]


def _mean_reward(samples: Sequence[Trajectory]) -> float | None:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return fmean(rewards) if rewards else None


def _score(result: Mapping[str, Any]) -> tuple[float, float]:
    """What is compared: the resolved rate, then the mean reward."""
    reward = result["reward"]
    return float(result["resolved_rate"]), float("-inf") if reward is None else float(reward)
