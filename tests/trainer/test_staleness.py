"""Asynchronous training on a real trainer and engine: staleness 0 is the synchronous run, more is bounded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import BlockingPortal

from sky_trainer import grpo
from sky_trainer.ahead import Ahead
from sky_trainer.config import RolloutConfig, from_mapping
from sky_trainer.curriculum import Plan, Stage
from sky_trainer.engines import HFEngine
from sky_trainer.rollouts import PlannedRollouts, Rollouts, opened
from sky_trainer.weights import CopiedWeights, SharedWeights
from skyenv import formats
from skyenv.renderer import Renderer
from skyenv.types import Limits, TrajectoryGroup
from skyenv.vector.pipeline import RolloutPipeline
from tests.rollout.adventure import Adventure, Ledger, Quest

STEPS, GROUPS, GROUP = 4, 2, 4
Collect = Callable[[Sequence[Any], int], list[TrajectoryGroup]]


def length_reward(trajectory: Any) -> float:
    """Something that samples differ in and a policy can change."""
    ids = [i for s in trajectory.segments for i, m in zip(s.token_ids, s.loss_mask, strict=True) if m]
    return sum(i < 150 for i in ids) / max(1, len(ids))


def make_plan() -> Plan:
    quests = tuple(Quest(name) for name in ("alpha", "beta", "gamma", "delta"))
    return Plan([Stage(0, STEPS, quests, RolloutConfig())], GROUPS, 0, STEPS)  # type: ignore[arg-type]


def make_pipeline(engine: HFEngine, tokenizer: Any) -> RolloutPipeline:
    return RolloutPipeline(
        engine=engine,
        make_env=lambda: Adventure(Ledger()),
        renderer=Renderer(tokenizer, formats.get("hermes")),
        limits=Limits(max_turns=2, max_tokens_per_turn=6, max_context=2048),
        reward=length_reward,
    )


class Run:
    """One training run over the adventure with the small model; keeps its batches, losses and final weights."""

    def __init__(self, out: Path, model: Any, tokenizer: Any, plan: Plan) -> None:
        self.out, self.model, self.tokenizer, self.plan = out, model, tokenizer, plan
        self.batches: list[list[TrajectoryGroup]] = []
        self.numbers: list[dict[str, float]] = []

    def train(self, collect: Collect, weights: Any) -> Run:
        def keep(tasks: Sequence[Any], size: int) -> list[TrajectoryGroup]:
            self.batches.append(collect(tasks, size))
            return self.batches[-1]

        def hear(step: int, numbers: Any) -> dict[str, float]:
            self.numbers.append(dict(numbers))
            return {"heard": float(step)}

        values = {
            "out": str(self.out),
            "steps": STEPS,
            "micro_batch": GROUPS * GROUP,
            "rollout": {"group_size": GROUP, "groups_per_step": GROUPS},
            "grpo": {"learning_rate": 1e-2, "use_cpu": True, "save_strategy": "no"},
        }
        self.trainer = grpo.SkyGRPOTrainer(
            self.model,
            args=grpo.grpo_config(from_mapping(values)),
            tasks=self.plan.tasks,
            order=self.plan.order(),
            collect=keep,
            weights=weights,
            processing_class=self.tokenizer,
            on_numbers=hear,
        )
        self.trainer.train()
        return self

    @property
    def rows(self) -> list[Any]:
        """All that was sampled: ids, masks, logprobs, versions, rewards."""
        return [
            [(t.task_id, t.group_id, t.sample_index, t.reward, t.segments, [turn.policy_version for turn in t.turns])]
            for groups in self.batches
            for group in groups
            for t in group.trajectories
        ]


def engine_on(module: Any, tokenizer: Any) -> HFEngine:
    """One request at a time, so that rounding does not depend on who shares a batch."""
    return HFEngine(module, tokenizer.decode, [tokenizer.eos_token_id], max_batch=1, gather=0.0)


def test_staleness_0_is_exactly_the_synchronous_run(
    tmp_path: Path, model: Any, tokenizer: Any, portal: BlockingPortal
) -> None:
    """Rows, losses and weights, with the trainer's module sampling and with a copy of it."""
    plan = make_plan()

    def plain(policy: Any) -> Run:
        with opened(portal, engine_on(policy, tokenizer)) as engine:
            pipeline, numbers = make_pipeline(engine, tokenizer), iter(range(STEPS))

            def collect(tasks: Sequence[Any], size: int) -> list[TrajectoryGroup]:
                first = next(numbers) * GROUPS

                async def play() -> list[Any]:
                    return [t async for t in pipeline.run(tasks, size, first_group=first)]

                found = sorted(portal.call(play), key=lambda t: (t.group_id, t.sample_index))
                groups = [found[start : start + size] for start in range(0, len(found), size)]
                return [TrajectoryGroup(group[0].task_id, group[0].group_id, group) for group in groups]

            return Run(tmp_path / "plain", policy, tokenizer, plan).train(collect, SharedWeights(engine))

    def ahead(policy: Any, copied: bool) -> Run:
        module = copy.deepcopy(policy) if copied else policy
        with opened(portal, engine_on(module, tokenizer)) as engine:
            weights = CopiedWeights(portal, engine, policy) if copied else SharedWeights(engine)
            playing = Ahead(plan, [make_pipeline(engine, tokenizer)], GROUP, staleness=0)
            with opened(portal, playing.opened()):
                rollouts = PlannedRollouts(portal, playing, lambda: weights.version)
                return Run(tmp_path / f"ahead{copied}", policy, tokenizer, plan).train(rollouts.collect, weights)

    first = plain(copy.deepcopy(model))
    assert len({row[0][3] for row in first.rows}) > 2
    for other in (ahead(copy.deepcopy(model), copied=False), ahead(copy.deepcopy(model), copied=True)):
        assert other.rows == first.rows
        assert [n["loss"] for n in other.numbers] == [n["loss"] for n in first.numbers]
        assert [n["grad_norm"] for n in other.numbers] == [n["grad_norm"] for n in first.numbers]
        theirs = other.model.state_dict()
        for name, value in first.model.state_dict().items():
            assert torch.equal(value, theirs[name]), name
    assert not torch.equal(first.model.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("allowed", [1, 3])
def test_stale_rollouts_are_bounded_counted_and_corrected(
    tmp_path: Path, model: Any, tokenizer: Any, portal: BlockingPortal, allowed: int
) -> None:
    plan = make_plan()
    with opened(portal, engine_on(copy.deepcopy(model), tokenizer)) as engine:
        weights = CopiedWeights(portal, engine, model)
        playing = Ahead(plan, [make_pipeline(engine, tokenizer)], GROUP, staleness=allowed)
        with opened(portal, playing.opened()):
            rollouts = PlannedRollouts(portal, playing, lambda: weights.version)
            told: list[dict[str, float]] = []

            def collect(tasks: Sequence[Any], size: int) -> list[TrajectoryGroup]:
                groups = rollouts.collect(tasks, size)
                told.append(rollouts.numbers())
                return groups

            run = Run(tmp_path / "run", model, tokenizer, plan).train(collect, weights)
    assert told[0]["staleness/max"] == 0.0
    assert all(row["staleness/max"] <= allowed for row in told)
    assert max(row["staleness/max"] for row in told) >= 1.0
    assert all(0.0 <= row["overlap/share"] <= 1.0 for row in told[1:])
    for number, groups in enumerate(run.batches):
        assert [group.task_id for group in groups] == [task.task_id for task in plan.batch(number).tasks]
    gaps = [row["sampling/sampling_logp_difference/max"] for row in run.numbers]
    assert gaps[0] < 1e-4
    assert max(gaps) > 1e-3
    ratios = [row["sampling/importance_sampling_ratio/max"] for row in run.numbers]
    assert all(ratio <= run.trainer.args.vllm_importance_sampling_clip_max for ratio in ratios)
    assert [row["heard"] for row in run.trainer.state.log_history if "loss" in row] == [1.0, 2.0, 3.0, 4.0]


def test_other_tasks_than_the_plans_are_an_error(tokenizer: Any, model: Any, portal: BlockingPortal) -> None:
    from skyenv.errors import SkyEnvError

    plan = make_plan()
    with opened(portal, engine_on(model, tokenizer)) as engine:
        playing = Ahead(plan, [make_pipeline(engine, tokenizer)], GROUP)
        with opened(portal, playing.opened()):
            rollouts = PlannedRollouts(portal, playing, lambda: 0)
            with pytest.raises(SkyEnvError, match="other tasks than the plan has for batch 0"):
                rollouts.collect(list(reversed(plan.batch(0).tasks)), GROUP)
            more = rollouts.more(plan.tasks[:1], 3)
            assert [(group.task_id, len(group.trajectories)) for group in more] == [(plan.tasks[0].task_id, 3)]
            numbered = {number for batch in range(STEPS) for number, _ in plan.batch(batch).groups()}
            assert more[0].group_id not in numbered


def test_the_blocking_face_of_a_pipeline_still_gives_whole_groups(
    tokenizer: Any, model: Any, portal: BlockingPortal
) -> None:
    with opened(portal, engine_on(model, tokenizer)) as engine:
        groups = Rollouts(portal, make_pipeline(engine, tokenizer)).collect([Quest("a"), Quest("b")], 2)
    assert [(group.task_id, len(group.trajectories)) for group in groups] == [("a", 2), ("b", 2)]
