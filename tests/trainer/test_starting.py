"""Where a policy starts: experts in real sandboxes, their ids under another tokenizer, supervised steps on them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from rich.console import Console

import skyenv
from sky_trainer import tiny
from sky_trainer.assembly import choose_tasks, make_format, make_renderer
from sky_trainer.commands.demo import recipe
from sky_trainer.config import Config, load
from sky_trainer.display import Display, sparkline
from sky_trainer.lessons import replayed
from sky_trainer.policies import corpus
from sky_trainer.rollouts import opened
from sky_trainer.sections.model import WarmStartConfig
from sky_trainer.starting import Sandboxes, play_experts
from sky_trainer.warm_start import batch_loss, supervise
from skyenv.renderer import ByteTokenizer
from skyenv.types import Segment, Trajectory


@pytest.fixture(scope="module")
def config() -> Config:
    return load(recipe("demo"), ["--tasks.limit", "1"])


@pytest.fixture(scope="module")
def experts(config: Config) -> Iterator[list[tuple[Trajectory, float]]]:
    display = Display(Console(file=io.StringIO()), "test", 1)
    with start_blocking_portal() as portal, opened(portal, skyenv.connect()) as provider:
        yield play_experts(config, choose_tasks(config.tasks), Sandboxes(portal, provider), display)


def tools(config: Config) -> Any:
    return skyenv.make(config.env.id, tasks=choose_tasks(config.tasks), **config.env.options).tools


def test_experts_are_graded_and_weighted(config: Config, experts: list[tuple[Trajectory, float]]) -> None:
    assert [trajectory.verdict["resolved"] for trajectory, _ in experts] == [True, False, False, False]
    assert sum(weight for _, weight in experts) == pytest.approx(1.0)
    assert experts[0][1] == config.warm_start.expert_rate


def test_a_replay_is_what_the_rollout_made(config: Config, experts: list[tuple[Trajectory, float]]) -> None:
    renderer = make_renderer(ByteTokenizer(), config.rollout)
    for trajectory, _ in experts:
        (again,), (played,) = replayed(trajectory, tools(config), renderer), trajectory.segments
        assert (again.token_ids, again.loss_mask) == (played.token_ids, played.loss_mask)


def test_the_tokenizer_learns_the_boilerplate(config: Config, experts: list[tuple[Trajectory, float]]) -> None:
    texts = corpus((trajectory for trajectory, _ in experts), tools(config), make_format(config.rollout))
    tokenizer = tiny.make_tokenizer(texts, 1200)
    renderer = make_renderer(tokenizer, config.rollout)
    (segment,) = replayed(experts[0][0], tools(config), renderer)
    assert renderer.drift(Trajectory("t", segments=[segment], turns=experts[0][0].turns)) == 0
    assert len(segment.token_ids) < len(experts[0][0].segments[0].token_ids) / 4


def test_supervised_steps_raise_the_likelihood_of_sampled_ids_alone(model: Any) -> None:
    segments = []
    for answer in ([40, 41, 1], [42, 43, 44, 1]):
        segment = Segment()
        segment.append_context([5, 6, answer[0]])
        segment.append_sampled(answer, [0.0] * len(answer))
        segments.append(segment)
    before = batch_loss(model, segments, 0).item()
    seen: list[int] = []
    settings = WarmStartConfig(steps=40, batch_size=2, learning_rate=1e-2)
    supervise(model, segments, [1, 1], settings, pad_id=0, seed=0, on_step=lambda step, loss: seen.append(step))
    assert seen == list(range(1, 41))
    assert batch_loss(model, segments, 0).item() < before / 10


def test_the_loss_is_the_mean_over_sampled_ids(model: Any) -> None:
    """Against a computation by hand, with padding and different lengths in the batch."""
    long, short = Segment([5, 6, 7, 8, 9], [0, 0, 1, 0, 1], [0.0] * 5), Segment([5, 6, 7], [0, 1, 1], [0.0] * 3)
    total, count = 0.0, 0
    for segment in (long, short):
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=torch.tensor([segment.token_ids])).logits[0], dim=-1)
        for position, mask in enumerate(segment.loss_mask):
            if mask:
                total -= scores[position - 1, segment.token_ids[position]].item()
                count += 1
    assert batch_loss(model, [long, short], 0).item() == pytest.approx(total / count, rel=1e-5)


def test_display_shows_steps_on_a_terminal_and_in_a_pipe() -> None:
    row = {"step": 3, "reward": 0.5, "rollout/resolved": 0.5, "elapsed": 12.0}
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
        with Display(console, "title", 9) as display:
            display.stage("warming up")
            display.trajectory(Trajectory("t", verdict={"resolved": True}))
            display.step(row)
        text = out.getvalue()
        assert "0.500" in text
        assert ("step 3/9" in text) is terminal
    assert sparkline([0.0, 0.5, 1.0, 2.0], 3) == "▄██"
