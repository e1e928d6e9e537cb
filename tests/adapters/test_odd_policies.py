"""Policies and servers that fail, say nothing, or never end: what adapters hand on, and what TRL makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from sky_trainer.tiny import make_model
from skyenv.adapters.opening import row_rules
from skyenv.adapters.sharing import sampled, shared_rollouts
from skyenv.adapters.trl import TRLRollouts, columns
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EngineError
from skyenv.samples import rows_from
from skyenv.types import Completion, Limits, Message, SamplingParams, StopReason, ToolCall, TrajectoryGroup
from skyenv.vector.request import Numbering
from tests.adapters import policies

TOKENIZER = policies.tokenizer()
RENDERER = policies.renderer(TOKENIZER)
LOOK = RENDERER.format.render_call(ToolCall("execute_bash", {"command": "ls"}))
LIMITS = Limits(max_turns=3, max_tokens_per_turn=64, max_context=8192)


class Broken:
    """An engine that fails for the samples whose number it is asked to fail for."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self._fails, self._policy = fails, policies.HalfRight(RENDERER)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        if self._fails(int(session_id.rpartition("#")[2].split(".")[1])):
            raise EngineError("out of memory")
        return await self._policy.generate(prompt_ids, sampling, messages=messages, session_id=session_id)


def play(engine: Any, limits: Limits = LIMITS) -> TrajectoryGroup:
    """A group of two through what verl's and SkyRL's adapters share."""
    rollouts = replace(policies.ROLLOUTS, limits=limits, sampling=SamplingParams(max_tokens=limits.max_tokens_per_turn))

    async def one() -> TrajectoryGroup:
        shared = shared_rollouts(rollouts, TOKENIZER)
        return await shared.play(policies.TASKS[0], engine, rollouts.sampling, Numbering(0, (0, 1)))

    with anyio.from_thread.start_blocking_portal() as portal:
        return portal.call(one)


def columns_of(group: TrajectoryGroup) -> dict[str, list[Any]]:
    return columns(rows_from([group], row_rules(TOKENIZER, "trajectory")))


def test_a_group_of_which_all_failed_is_neutral_rows() -> None:
    group = play(Broken(lambda sample: True))
    assert [t.failure is not None and t.failure.kind for t in group.trajectories] == ["EngineError"] * 2
    rows = columns_of(group)
    assert rows["env_reward"] == [None, None]
    assert rows["env_mask"] == [[0], [0]]
    assert rows["completion_ids"] == [[TOKENIZER.eos_token_id]] * 2
    assert all(rows["prompt_ids"])


def test_answers_of_nothing_are_samples_too() -> None:
    """An end and nothing before it: each turn has one sampled id."""
    group = play(ScriptedEngine(RENDERER, [""] * 9))
    for trajectory in group.trajectories:
        assert (trajectory.failure, trajectory.reward) == (None, 0.0)
        assert trajectory.sampled_tokens == len(trajectory.turns) > 0
        assert RENDERER.drift(trajectory) == 0
    rows = columns_of(group)
    assert [sum(mask) for mask in rows["env_mask"]] == [t.sampled_tokens for t in group.trajectories]


def test_an_answer_that_is_always_cut_off_is_a_sample() -> None:
    group = play(ScriptedEngine(RENDERER, ["word " * 500] * 9))
    for trajectory in group.trajectories:
        assert trajectory.trainable
        assert {turn.finish_reason for turn in trajectory.turns} == {"length"}
        assert trajectory.sampled_tokens == len(trajectory.turns) * LIMITS.max_tokens_per_turn


def test_a_context_that_is_full_in_the_middle_ends_the_trajectory_within_it() -> None:
    begun = columns_of(play(ScriptedEngine(RENDERER, [LOOK] * 9)))
    room = len(begun["prompt_ids"][0]) + len(begun["completion_ids"][0]) + 200
    limits = Limits(max_turns=200, max_tokens_per_turn=128, max_context=room)
    group = play(ScriptedEngine(RENDERER, [LOOK] * 200), limits)
    rows = columns_of(group)
    for place, trajectory in enumerate(group.trajectories):
        assert trajectory.stop_reason is StopReason.CONTEXT
        assert len(trajectory.turns) > 1
        assert len(rows["prompt_ids"][place]) + len(rows["completion_ids"][place]) <= room


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "expected"),
    [
        ((5, 9), (-1.0, -2.0), "stop", "stop"),
        ((5, 6), (-1.0, -2.0), "stop", "length"),
        ((5, 6), (-1.0, -2.0), None, "length"),
        ((5,), (-1.0,), "abort", "aborted the generation"),
        ((), (), "aborted", "aborted the generation"),
        ((), (), "stop", "answered no token ids"),
        ((5, 9), (-1.0,), "stop", "2 token ids but 1 logprobs"),
    ],
)
def test_what_a_librarys_server_may_answer(ids: Any, logprobs: Any, reason: str | None, expected: str) -> None:
    sampling = SamplingParams(stop_token_ids=(9,))
    if expected in ("stop", "length"):
        assert sampled("verl", ids, logprobs, reason, sampling).finish_reason == expected
    else:
        with pytest.raises(EngineError, match=f"verl's server .*{expected}"):
            sampled("verl", ids, logprobs, reason, sampling)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    endless = policies.tokenizer()
    endless.eos_token = None
    with pytest.raises(ConfigError, match="tokenizer: it has no eos token"):
        TRLRollouts(policies.ROLLOUTS, Broken(lambda sample: True), endless)


@pytest.mark.parametrize("failing", ["all", "one"])
def test_adapter_of_trl_learns_nothing_from_failures(failing: str, tmp_path: Path) -> None:
    """When all failed the weights stay; when a sibling failed what is left of the group has nothing to compare with."""
    engine = Broken(lambda sample: failing == "all" or sample == 1)
    model = make_model(TOKENIZER, hidden=32, layers=1, seed=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    args = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=4, learning_rate=1e-2,
        use_cpu=True, bf16=False, report_to="none", logging_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    with TRLRollouts(policies.ROLLOUTS, engine, TOKENIZER) as rollouts:
        trainer = GRPOTrainer(
            model=model, reward_funcs=rollouts.reward, args=args, train_dataset=rollouts.dataset(),
            processing_class=TOKENIZER, rollout_func=rollouts,
        )  # fmt: skip
        trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
