"""What is said of a step: warnings that come when they should, tables, TensorBoard, evaluation while training."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sky_trainer import grpo
from sky_trainer.ahead import Ahead
from sky_trainer.alarms import NAMES, Alarms
from sky_trainer.config import EvaluationConfig, RolloutConfig
from sky_trainer.curriculum import Plan, Stage
from sky_trainer.display import Display
from sky_trainer.evaluated import append_sample, read_samples
from sky_trainer.files import read_lines
from sky_trainer.filters import FilterConfig
from sky_trainer.in_loop import InLoop
from sky_trainer.record import RunRecord, read_metrics
from sky_trainer.rollouts import PlannedRollouts, opened
from sky_trainer.watch import Watch
from skyenv.engines.scripted import ScriptedEngine
from skyenv.types import Trajectory
from skyenv.vector.pipeline import RolloutPipeline
from tests.rollout.adventure import LOSE, RENDERER, WIN, Adventure, Ledger, Quest
from tests.trainer.conftest import MakeTrainer, Player

HEALTHY = {
    "entropy": 1.0,
    "frac_reward_zero_std": 0.25,
    "kl": 0.01,
    "count/drift": 0.0,
    "clip_ratio/region_mean": 0.02,
    "sampling/sampling_logp_difference/mean": 1e-4,
    "rollout/failed": 0.0,
    "rollout/resolved": 0.3,
}
TROUBLE: dict[str, tuple[dict[str, float], int, str]] = {
    "entropy": ({"entropy": 0.05}, 3, "grpo.learning_rate"),
    "zero_groups": ({"frac_reward_zero_std": 0.95}, 3, "too hard: choose tasks"),
    "kl": ({"kl": 0.5}, 1, "raise grpo.beta"),
    "drift": ({"count/drift": 1.0}, 1, "Stop, and look"),
    "clip_ratio": ({"clip_ratio/region_mean": 0.5}, 3, "grpo.num_iterations"),
    "logprob_gap": ({"sampling/sampling_logp_difference/mean": 0.2}, 1, "check that its weights are updated"),
    "failures": ({"rollout/failed": 0.5}, 1, "sky_trainer show RUN --failed"),
}


def test_every_warning_has_its_trouble() -> None:
    assert set(TROUBLE) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_warning_comes_with_its_trouble_alone_and_says_what_to_do(name: str) -> None:
    alarms, (trouble, steps, advice) = Alarms(), TROUBLE[name]
    for _ in range(10):
        assert alarms.look(HEALTHY) == []
    seen = [alarms.look({**HEALTHY, **trouble}) for _ in range(steps)]
    assert all(warned == [] for warned in seen[:-1])
    assert [warned.name for warned in seen[-1]] == [name]
    assert advice in seen[-1][0].text
    assert alarms.look(HEALTHY) == []


def test_what_is_well_is_not_warned_of() -> None:
    alarms = Alarms()
    for _ in range(5):
        assert alarms.look({}) == []
        assert alarms.look({"entropy": None, "kl": None}) == []
        alarms.look(HEALTHY)
    solved = {**HEALTHY, "entropy": 0.01, "rollout/resolved": 1.0}  # what a policy that solves everything looks like
    assert [alarms.look(solved) for _ in range(5)] == [[]] * 5
    stale = {**HEALTHY, "staleness/max": 1.0, "sampling/sampling_logp_difference/mean": 0.1}
    assert alarms.look(stale) == []
    (warned,) = alarms.look({**stale, "sampling/sampling_logp_difference/mean": 0.9})
    assert "lower staleness" in warned.text


def test_groups_that_are_all_solved_ask_for_harder_tasks() -> None:
    alarms = Alarms()
    easy = {**HEALTHY, "frac_reward_zero_std": 1.0, "rollout/resolved": 1.0}
    *_, warned = [alarms.look(easy) for _ in range(3)]
    assert "too easy: go on to harder ones" in warned[0].text


# Through the run's own objects, on the text adventure


def pipeline(script: Any) -> RolloutPipeline:
    return RolloutPipeline(
        engine=ScriptedEngine(RENDERER, script), make_env=lambda: Adventure(Ledger()), renderer=RENDERER
    )


@pytest.fixture
def record(tmp_path: Path) -> Iterator[RunRecord]:
    record = RunRecord(tmp_path / "run")
    yield record
    record.close()


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_a_step_is_recorded_shown_and_warned_of(tmp_path: Path, portal: BlockingPortal) -> None:
    plan = Plan([Stage(0, 2, (Quest("a"), Quest("b")), RolloutConfig())], 2, 0, 2)  # type: ignore[arg-type]
    record, shown = RunRecord(tmp_path), io.StringIO()
    ahead = Ahead(plan, [pipeline({"a": WIN, "b": LOSE})], 2)
    with opened(portal, ahead.opened()):
        rollouts = PlannedRollouts(portal, ahead, lambda: 0)
        display = Display(Console(file=shown, width=400), "test", 2)
        watch = Watch(record, display, rollouts, None, FilterConfig(), 1)
        for step in (1, 2):
            watch.collect(plan.batch(step - 1).tasks, 2)
            ours = watch.numbers(step, {**HEALTHY, "reward": 0.5, "count/drift": float(step - 1)})
    record.close()
    assert (ours["warning/drift"], ours["warning/kl"], ours["curriculum/stage"]) == (1.0, 0.0, 1.0)
    assert [row["warning/drift"] for row in read_metrics(tmp_path)] == [0.0, 1.0]
    assert shown.getvalue().count("warning: step 2: 1 trajectories hold ids that differ") == 1
    table = list(read_lines(tmp_path / "rollouts.jsonl"))
    assert sorted((row["step"], row["task"], row["sample"], row["reward"]) for row in table) == sorted(
        (step, task, sample, float(task == "a")) for step in (1, 2) for task in "ab" for sample in (0, 1)
    )
    assert {row["stop_reason"] for row in table} == {"finish"}
    board = events(tmp_path / "tensorboard")
    assert [event.value for event in board.Scalars("warning/drift")] == [0.0, 1.0]
    (first, _) = board.Tensors("rollouts/text_summary")
    assert b"| task |" in first.tensor_proto.string_val[0]
    again = Watch(RunRecord(tmp_path, 2), display, rollouts, None, FilterConfig(), 1)
    assert again.numbers(3, {**HEALTHY, "kl": 0.2})["warning/kl"] == 0.0  # two steps are too few to know what is usual


def test_what_is_logged_reaches_tensorboard_by_trl(player: Player, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(player, {"steps": 2}, report_to="tensorboard")
    trainer._on_numbers = lambda step, numbers: {"warning/kl": 1.0}
    trainer.train()
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents.*")}
    board = events(folder)
    assert [event.step for event in board.Scalars("train/reward")] == [1, 2]
    assert [event.value for event in board.Scalars("train/warning/kl")] == [1.0, 1.0]


class Evaluating:
    """An evaluation over the adventure, whose policy is a script, with its real record."""

    def __init__(self, record: RunRecord, portal: BlockingPortal, every: int = 2) -> None:
        self.config = EvaluationConfig(every=every, samples=2)
        self.record, self.portal = record, portal

    def run(self, step: int, script: Any) -> tuple[bool, dict[str, float]]:
        tasks: Any = [Quest("a"), Quest("b")]
        evaluation = InLoop(self.config, tasks, pipeline(script), self.portal, self.record)
        assert evaluation.due(step)
        best = evaluation.run(step)
        return best, evaluation.numbers()


def test_the_best_policy_so_far_is_known(record: RunRecord, portal: BlockingPortal) -> None:
    evaluating = Evaluating(record, portal)
    best, numbers = evaluating.run(0, LOSE)
    assert best
    assert (numbers["eval/resolved_rate"], numbers["eval/pass@1"], numbers["eval/failed"]) == (0.0, 0.0, 0.0)
    assert evaluating.run(2, {"a": WIN, "b": LOSE})[0]
    assert not evaluating.run(4, {"a": LOSE, "b": WIN})[0]  # as good, not better
    assert evaluating.run(6, WIN)[1]["eval/resolved_rate"] == 1.0
    assert [row["step"] for row in read_lines(record.run_dir / "evaluations.jsonl")] == [0, 2, 4, 6]
    assert [row["resolved_rate"] for row in read_lines(record.run_dir / "evaluations.jsonl")] == [0.0, 0.5, 0.5, 1.0]


def test_an_evaluation_that_was_cut_short_goes_on(record: RunRecord, portal: BlockingPortal) -> None:
    path = record.run_dir / "evaluation.jsonl"
    there = Trajectory("a", sample_index=1, reward=1.0, verdict={"resolved": True})
    append_sample(path, there, "step 2")
    append_sample(path, Trajectory("b", sample_index=0, reward=1.0, verdict={"resolved": True}), "step 4")
    _, numbers = Evaluating(record, portal).run(2, LOSE)
    assert numbers["eval/resolved_rate"] == 0.25
    samples = read_samples(path, "step 2")
    assert sorted((s.task_id, s.sample_index) for s in samples) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@pytest.mark.parametrize(("at_start", "steps"), [(True, [0, 3, 6]), (False, [3, 6])])
def test_when_an_evaluation_is_due(record: RunRecord, portal: BlockingPortal, at_start: bool, steps: list[int]) -> None:
    config = EvaluationConfig(every=3, at_start=at_start)
    evaluation = InLoop(config, [], pipeline(WIN), portal, record)
    assert [step for step in range(8) if evaluation.due(step)] == steps


class Scripted:
    """A stand-in for the evaluation that is asked by a real trainer: every second step, better each time but once."""

    def __init__(self, best: Path, better: Callable[[int], bool]) -> None:
        self.best, self.better = best, better
        self.seen: list[tuple[int, int]] = []
        self.version: Callable[[], int] = lambda: -1

    def due(self, step: int) -> bool:
        return step % 2 == 0

    def run(self, step: int) -> bool:
        self.seen.append((step, self.version()))
        return self.better(step)


def test_the_trainer_evaluates_its_own_weights_and_keeps_the_best(
    player: Player, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer: grpo.SkyGRPOTrainer = make_trainer(player, {"steps": 4, "save_every": 9})
    evaluation = Scripted(tmp_path / "best", lambda step: step == 2)
    evaluation.version = lambda: player.engine.policy_version
    trainer._evaluation = evaluation
    kept: dict[int, Any] = {}
    evaluation.better = lambda step: kept.update({step: trainer.model.lm_head.weight.detach().clone()}) or step == 2
    trainer.train()
    assert evaluation.seen == [(0, 0), (2, 2), (4, 4)]
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert torch.equal(best.lm_head.weight, kept[2])
    assert not torch.equal(best.lm_head.weight, kept[4])
    assert AutoTokenizer.from_pretrained(tmp_path / "best").eos_token == trainer.processing_class.eos_token
    trainer.export(tmp_path / "best")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "best").lm_head.weight, kept[4])
    assert sorted(path.name for path in tmp_path.iterdir() if "best" in path.name) == ["best"]
