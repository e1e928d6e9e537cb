"""TRL: our rollouts under anyone's own `GRPOTrainer`.

`TRLRollouts` is what `rollout_func` takes. TRL hands over the prompts of one rank, each repeated for its group, and
wants one row for each; a prompt here is a task's id. Rows carry the sampler's logprobs and a mask, and the reward as
a field that `reward` reads. TRL's own trainer corrects for the sampler's logprobs only when it generates itself
through vLLM; `sky_trainer` lifts that, and trains on several rows a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from skyenv.adapters.opening import BlockingRollouts, Rollouts, row_rules
from skyenv.core import Engine
from skyenv.errors import ConfigError
from skyenv.samples import Row, rows_from
from skyenv.types import TrajectoryGroup


class TRLRollouts(BlockingRollouts):
    """Pass it as `rollout_func`, `reward` among `reward_funcs` and `dataset()` as `train_dataset`, inside `with`.

    `rows`: what to do with a trajectory whose history was rewritten, which TRL has no room for: an error, or train on
    the `last` part. `groups` are those of the last call.
    """

    def __init__(
        self, rollouts: Rollouts, engine: Engine, tokenizer: Any, *, rows: Literal["trajectory", "last"] = "trajectory"
    ) -> None:
        super().__init__(rollouts, engine, tokenizer)
        self._rules = row_rules(tokenizer, rows)
        self.groups: list[TrajectoryGroup] = []

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """One row for each prompt, in order. A run of equal prompts is a group; a rank may hold a part of one."""
        wanted = [(task_id, sum(1 for _ in same)) for task_id, same in groupby(_task_ids(prompts))]
        pieces = [piece for task_id, count in wanted for piece in _pieces(task_id, count, _group_size(trainer))]
        self.groups = []
        for count in {count for _, count in pieces}:
            self.groups += self.collect([task_id for task_id, size in pieces if size == count], count)
        by_task: dict[tuple[str, int], list[TrajectoryGroup]] = {}
        for group in self.groups:
            by_task.setdefault((group.task_id, len(group.trajectories)), []).append(group)
        ordered = [by_task[piece].pop(0) for piece in pieces]
        return columns(rows_from(ordered, self._rules))

    def dataset(self) -> Any:
        """One row a task, for `train_dataset`."""
        from datasets import Dataset

        return Dataset.from_list([{"prompt": task_id} for task_id in self.tasks])

    @staticmethod
    def reward(env_reward: list[float | None], **_: Any) -> list[float | None]:
        """The environments' own rewards; None leaves a row out of its group."""
        return env_reward


def columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Rows as the columns that TRL's `rollout_func` returns; the last three reach the reward function."""
    first = [row.trajectory != before for row, before in zip(rows, [None, *(r.trajectory for r in rows)], strict=False)]
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.completion_ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "env_mask": [row.loss_mask for row in rows],
        "env_reward": [row.reward if head else None for row, head in zip(rows, first, strict=True)],
        "status": [row.status for row in rows],
        "task_id": [row.task_id for row in rows],
    }


def _task_ids(prompts: Sequence[Any]) -> list[str]:
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(f"prompt: {prompt!r} is no task id; train on `dataset()`")
    return list(prompts)


def _group_size(trainer: Any) -> int:
    """How many samples a task gets, in training or evaluation."""
    training = trainer.model.training
    return int(trainer.num_generations if training else trainer.num_generations_eval or 1)


def _pieces(task_id: str, count: int, size: int) -> list[tuple[str, int]]:
    """A run of equal prompts as groups: whole ones, and what is left of one."""
    return [(task_id, size)] * (count // size) + ([(task_id, count % size)] if count % size else [])
