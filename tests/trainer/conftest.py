"""A very small policy and trajectories that it really sampled: enough for the whole contract with TRL, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from sky_trainer import grpo, tiny
from sky_trainer.config import from_mapping
from sky_trainer.engines import HFEngine
from sky_trainer.rollouts import call
from sky_trainer.sections.lora import with_adapters
from sky_trainer.weights import SharedWeights
from skyenv.types import Failure, SamplingParams, Segment, StopReason, Trajectory, TrajectoryGroup, Turn

torch.set_num_threads(1)
GROUP = 4


@dataclass(frozen=True)
class Word:
    task_id: str


TASKS = [Word(name) for name in ("alpha", "beta", "gamma", "delta")]
ENVIRONMENT_WORDS = "the tool says no"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.make_tokenizer([task.task_id for task in TASKS] + [ENVIRONMENT_WORDS] * 3, 300)


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return tiny.make_model(tokenizer, hidden=32, layers=1, seed=0)


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture
def engine(portal: BlockingPortal, model: Any, tokenizer: Any) -> Iterator[HFEngine]:
    with portal.wrap_async_context_manager(HFEngine(model, tokenizer.decode, [tokenizer.eos_token_id])) as engine:
        yield engine


Reward = Callable[[int, int], float | None]


@dataclass
class Player:
    """A stand-in for the pipeline: two real generations with an environment's words between them, per sample.

    `reward(group, sample)` decides; None makes a typed failure without ids.
    """

    portal: BlockingPortal
    engine: HFEngine
    tokenizer: Any
    reward: Reward = lambda group, sample: float(sample % 2)
    edit: Callable[[list[TrajectoryGroup]], None] = lambda groups: None
    max_tokens: int = 5
    batches: list[list[TrajectoryGroup]] = field(default_factory=list)
    asked: list[tuple[list[str], int]] = field(default_factory=list)

    def __call__(self, tasks: Sequence[Any], size: int) -> list[TrajectoryGroup]:
        self.asked.append(([task.task_id for task in tasks], size))
        groups = [
            TrajectoryGroup(task.task_id, g, [self.play(task.task_id, g, s) for s in range(size)])
            for g, task in enumerate(tasks)
        ]
        self.edit(groups)
        self.batches.append(groups)
        return groups

    def play(self, word: str, group: int, sample: int) -> Trajectory:
        reward = self.reward(group, sample)
        trajectory = Trajectory(word, group, sample, reward=reward, stop_reason=StopReason.FINISH)
        if reward is None:
            trajectory.failure = Failure("init", "SandboxLost", "gone")
            trajectory.stop_reason = StopReason.SANDBOX_ERROR
            return trajectory
        segment = Segment()
        segment.append_context(self.tokenizer.encode(f"<|im_start|>user\n{word}<|im_end|>\n"))
        for turn in range(2):
            if turn:
                segment.append_context(self.tokenizer.encode(ENVIRONMENT_WORDS))
            sampling = SamplingParams(max_tokens=self.max_tokens)
            answer = call(self.portal, self.engine.generate, list(segment.token_ids), sampling)
            segment.append_sampled(answer.token_ids, answer.logprobs)
            trajectory.turns.append(Turn(answer.text, (), "", answer.finish_reason, answer.policy_version, 0.0, 0.0))
        trajectory.segments.append(segment)
        trajectory.verdict = {"resolved": reward == 1.0}
        return trajectory


@pytest.fixture
def player(portal: BlockingPortal, engine: HFEngine, tokenizer: Any) -> Player:
    return Player(portal, engine, tokenizer)


def once(player: Player) -> Callable[[Sequence[Any], int], list[TrajectoryGroup]]:
    """The same batch, whatever is asked: what differs between trainers is then not what was sampled."""
    recorded: list[list[TrajectoryGroup]] = []

    def collect(tasks: Sequence[Any], size: int) -> list[TrajectoryGroup]:
        if not recorded:
            recorded.append(player(tasks, size))
        return recorded[0]

    return collect


MakeTrainer = Callable[..., grpo.SkyGRPOTrainer]


@pytest.fixture
def make_trainer(tmp_path: Path, model: Any, engine: HFEngine, tokenizer: Any) -> MakeTrainer:
    """A trainer over the session's small model; `config` overrides top-level keys, `options` go to `grpo:`."""

    def make(collect: Any, config: dict[str, Any] | None = None, **options: Any) -> grpo.SkyGRPOTrainer:
        values = {
            "out": str(tmp_path / "run"),
            "steps": 1,
            "micro_batch": 8,
            "rollout": {"group_size": GROUP, "groups_per_step": 2, "max_context": 64, "max_tokens_per_turn": 16},
            "grpo": {"learning_rate": 1e-2, "use_cpu": True, **options},
            **(config or {}),
        }
        settings = from_mapping(values)
        return grpo.SkyGRPOTrainer(
            with_adapters(model, settings.lora),
            args=grpo.grpo_config(settings),
            tasks=TASKS,
            collect=collect,
            weights=SharedWeights(engine),
            processing_class=tokenizer,
            rows=settings.rollout.rows,
            advantage=settings.advantage,
            filters=settings.filter,
        )

    return make
