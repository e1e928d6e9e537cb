"""Supervised training: which demonstrations with which ids, the numbers against a plain loop, and sft then train."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sky_trainer import config as configuration
from sky_trainer import sft
from sky_trainer.assembly import make_renderer
from sky_trainer.cli import main
from sky_trainer.commands.demo import recipe
from sky_trainer.config import Config, RolloutConfig
from sky_trainer.demonstrations import Demonstration, demonstration_of, read_demonstrations
from sky_trainer.lessons import AsWritten, Classroom, replayed, sampled_runs
from sky_trainer.models import load_model
from sky_trainer.record import last_checkpoint, read_metrics
from sky_trainer.rows import export_rows
from sky_trainer.sections.lora import LoraConfig
from sky_trainer.sections.model import ModelConfig
from sky_trainer.sections.sft import SftConfig
from sky_trainer.supervised import teach
from skyenv import formats
from skyenv.errors import ConfigError
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.tools import default_tools
from skyenv.trajectory_io import append_trajectories, read_trajectories, trajectory_to_json
from skyenv.types import Message, Segment, ToolCall, Trajectory, Turn

TOOLS = tuple(tool.spec for tool in default_tools())
CALL = ToolCall("execute_bash", {"command": "ls"})
HERMES = formats.get("hermes")


def segment(*parts: tuple[int, Sequence[int]]) -> Segment:
    made = Segment()
    for mask, ids in parts:
        if mask:
            made.append_sampled(ids, [-0.5] * len(ids))
        else:
            made.append_context(ids)
    return made


SEGMENTS = [
    segment((0, [5, 6, 7]), (1, [40, 41, 1]), (0, [9, 9]), (1, [42, 1])),
    segment((0, [5, 6]), (1, [43, 44, 45, 1])),
    segment((0, [8, 5, 6, 7, 9, 20]), (1, [46, 1])),
    segment((0, [8]), (1, [47, 48, 49, 50, 51, 1]), (0, [12])),
]


def settings(tmp_path: Path, micro_batch: int = 4, **values: Any) -> Config:
    options = {"use_cpu": True, "train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
    section = SftConfig(steps=3, batch_size=4, learning_rate=1e-2, options={**options, "warmup_steps": 0, **values})
    return Config(out=str(tmp_path / f"run{micro_batch}"), micro_batch=micro_batch, sft=section)


def trained(model: Any, tokenizer: Any, config: Config, **options: Any) -> tuple[Any, list[float]]:
    losses: list[float] = []
    twin = copy.deepcopy(model)
    trainer = sft.SkySFTTrainer(
        twin,
        SEGMENTS,
        args=sft.sft_config(config, len(SEGMENTS)),
        processing_class=tokenizer,
        on_numbers=lambda step, numbers: losses.append(numbers["loss"]),
        **options,
    )
    trainer.train()
    return twin, losses


def test_losses_and_weights_are_those_of_a_plain_loop(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for _ in range(3):
        total, count = torch.zeros(()), 0
        for row in SEGMENTS:
            scores = torch.log_softmax(reference(input_ids=torch.tensor([row.token_ids])).logits[0], dim=-1)
            learnt = [i for i, mask in enumerate(row.loss_mask) if mask]
            total = total - sum(scores[i - 1, row.token_ids[i]] for i in learnt)
            count += len(learnt)
        (total / count).backward()
        expected.append((total / count).item())
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    twin, losses = trained(model, tokenizer, settings(tmp_path))
    assert losses == pytest.approx(expected, abs=2e-4)  # TRL logs four digits
    for ours, theirs in zip(twin.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_micro_batches_change_nothing(micro_batch: int, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    whole, expected = trained(model, tokenizer, settings(tmp_path))
    split, losses = trained(model, tokenizer, settings(tmp_path, micro_batch))
    assert losses == pytest.approx(expected, abs=2e-4)
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_what_stands_behind_the_last_answer_teaches_nothing(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Observations are context: other ids behind the last learnt one leave loss and weights as they are."""
    first, expected = trained(model, tokenizer, settings(tmp_path))
    SEGMENTS[3].token_ids[-1] = 200
    try:
        second, losses = trained(model, tokenizer, settings(tmp_path))
    finally:
        SEGMENTS[3].token_ids[-1] = 12
    assert losses == expected
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 3}, "sft.options.max_length is set by sft.max_length"),
        ({"packing": True}, "sft.options.packing is set by nothing"),
        ({"warmup_step": 3}, "did you mean 'sft.options.warmup_steps'"),
        ({"warmup_steps": "few"}, "sft.options.warmup_steps is 'few'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = Config(out=str(tmp_path), micro_batch=1, sft=SftConfig(options=options))
    with pytest.raises(ConfigError, match=message):
        sft.sft_config(config, 4)


def test_a_batch_is_whole_micro_batches() -> None:
    with pytest.raises(ConfigError, match="it must be a multiple of the 3 rows"):
        sft.sft_config(Config(micro_batch=3), 4)


# Which demonstrations, and with which ids.


def room(rollout: RolloutConfig | None = None) -> Classroom:
    tokenizer = ByteTokenizer()
    renderer = make_renderer(tokenizer, rollout or RolloutConfig())
    return Classroom(renderer, Renderer(tokenizer, AsWritten(renderer.format)), tokenizer.vocab_size, lambda: TOOLS)


def answer(call: ToolCall = CALL, format_name: str = "hermes") -> str:
    return "I look.\n" + formats.get(format_name).render_call(call)


def played(text: str = answer(), reward: float | None = 1.0) -> Trajectory:
    prompt = (Message("system", "You repair."), Message("user", "Fix it."))
    turns = [Turn(text, (CALL,), "a.py", "stop", 0, 0.0, 0.0), Turn("done", (), "", "stop", 0, 0.0, 0.0)]
    trajectory = Trajectory("t", prompt=prompt, turns=turns, reward=reward, verdict={"resolved": reward == 1.0})
    trajectory.segments = replayed(trajectory, TOOLS, room().renderer)
    return trajectory


def demonstration(trajectory: Trajectory) -> Demonstration:
    return demonstration_of("here", json.loads(json.dumps(trajectory_to_json(trajectory), default=str)))


def room_of(tokenizer: Any) -> Classroom:
    renderer = make_renderer(tokenizer, RolloutConfig())
    return Classroom(renderer, Renderer(tokenizer, AsWritten(renderer.format)), len(tokenizer), lambda: TOOLS)


def test_sampled_ids_are_taken_as_they_are(tokenizer: Any) -> None:
    """Also where encoding the text again gives others, as it mostly does for what a model sampled."""
    classroom = room_of(tokenizer)
    trajectory = played()
    trajectory.segments = replayed(trajectory, TOOLS, classroom.renderer)
    (rendered,) = trajectory.segments
    pieces = [i for letter in answer() for i in classroom.renderer.encode(letter)]
    sampled = [*pieces, classroom.renderer.end_of_turn]
    (first, last), start = sampled_runs(rendered), rendered.prompt_length
    observed = rendered.token_ids[start + len(first) : -len(last)]
    recorded = segment((0, rendered.token_ids[:start]), (1, sampled), (0, observed), (1, last))
    assert pieces != first[:-1]
    how, (taken,) = classroom.segments(demonstration(dataclasses.replace(trajectory, segments=[recorded])))
    assert how == "with the ids that were sampled"
    assert taken == recorded


def test_ids_of_another_tokenizer_are_rendered_anew() -> None:
    """Whether they decode to other text or are no ids of this tokenizer at all."""
    trajectory = played()
    expected = [(s.token_ids, s.loss_mask) for s in trajectory.segments]
    for foreign in ([1 + n % 250 for n in trajectory.segments[0].token_ids], [9000] * len(expected[0][0])):
        other = dataclasses.replace(trajectory, segments=[Segment(foreign, *_rest(trajectory.segments[0]))])
        how, segments = room().segments(demonstration(other))
        assert how == "rendered with this model's format"
        assert [(s.token_ids, s.loss_mask) for s in segments] == expected


def _rest(segment: Segment) -> tuple[list[int], list[float]]:
    return segment.loss_mask, segment.logprobs


def test_the_filters_and_their_counts() -> None:
    failed = dataclasses.replace(played(reward=None), failure=None, exact=False)
    good, poor = played(), played(reward=0.25)
    every = [demonstration(t) for t in (good, poor, failed)]
    assert room().lessons(every, SftConfig()).left_out == {}
    assert room().lessons(every, SftConfig(resolved=True)).left_out == {"left out, not resolved": 2}
    kept = room().lessons(every, SftConfig(min_reward=0.2))
    assert kept.left_out == {"left out, reward below 0.2 or none": 1}
    assert kept.taken == {"with the ids that were sampled": 2}
    assert "2 demonstrations, 2 rows" in kept.describe()
    length = len(good.segments[0].token_ids)
    assert room().lessons(every[:1], SftConfig(max_length=length)).left_out == {}
    with pytest.raises(
        ConfigError, match=f"nothing to learn from.*1 left out, longer than sft.max_length {length - 1}"
    ):
        room().lessons(every[:1], SftConfig(max_length=length - 1))


def test_calls_of_another_format_are_not_taught() -> None:
    other = dataclasses.replace(played(answer(format_name="codeact")), exact=False)
    with pytest.raises(ConfigError, match="calls not written in format hermes"):
        room().lessons([demonstration(other)], SftConfig())
    assert room(RolloutConfig(format="codeact")).lessons([demonstration(other)], SftConfig()).taken.total() == 1


def test_an_answer_that_holds_the_end_of_answers_is_not_taught() -> None:
    other = dataclasses.replace(played("I<|im_end|> look.\n" + HERMES.render_call(CALL)), exact=False)
    with pytest.raises(ConfigError, match="an answer holds the token that ends answers"):
        room().lessons([demonstration(other)], SftConfig())


def test_a_transcript_with_calls_beside_the_text_is_what_a_rollout_makes() -> None:
    function = {"name": "execute_bash", "arguments": '{"command": "ls"}'}
    row = {
        "messages": [
            {"role": "system", "content": "You repair."},
            {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
            {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "a", "function": function}]},
            {"role": "tool", "tool_call_id": "a", "content": "a.py"},
            {"role": "assistant", "content": "done"},
        ]
    }
    (expected,) = played().segments
    how, (made,) = room().segments(demonstration_of("here", row))
    assert how == "rendered with this model's format"
    assert (made.token_ids, made.loss_mask) == (expected.token_ids, expected.loss_mask)


def test_a_transcript_that_says_everything_is_rendered_as_written() -> None:
    """As data sets of agents with tools in the prompt are: the chat template's text, answers under mask 1."""
    messages = [
        ("system", "Tools: ls"),
        ("user", "Fix."),
        ("assistant", "<ls>"),
        ("user", "RESULT a.py"),
        ("user", "!"),
    ]
    messages.append(("assistant", "done"))
    row = {"messages": [{"role": role, "content": text} for role, text in messages], "reward": 1, "resolved": True}
    how, (made,) = room().segments(demonstration_of("here", row))
    assert how == "rendered as written"
    whole = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    assert ByteTokenizer().decode(made.token_ids) + "\n" == whole
    assert [ByteTokenizer().decode(run) for run in sampled_runs(made)] == ["<ls><|im_end|>", "done<|im_end|>"]


@pytest.mark.parametrize("kind", ["segment", "turn"])
def test_exported_rows_teach_their_ids(kind: Any, tmp_path: Path) -> None:
    trajectory = played()
    for name in ("rows.jsonl", "rows.parquet", "rows"):
        export_rows(tmp_path / name, [trajectory], kind)
        lessons = room().lessons(read_demonstrations([str(tmp_path / name)]), SftConfig())
        assert set(lessons.taken) == {"with the ids that were sampled"}
        learnt = [run for row in lessons.segments for run in sampled_runs(row)]
        assert learnt == sampled_runs(trajectory.segments[0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jsonl", None, "cannot read .*none.jsonl"),
        ("a.txt", "x", "must be a .jsonl or .parquet file"),
        ("a.jsonl", "{", "a.jsonl line 1 is not JSON"),
        ("a.jsonl", '\n{"a": 1}', "a.jsonl line 2 is no trajectory"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "line 1 is no trajectory"),
    ],
)
def test_files_that_are_none(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(read_demonstrations([str(tmp_path / name)]))


# The runs.


def run_config(tmp_path: Path, out: str, **values: Any) -> Config:
    store = tmp_path / "store.jsonl"
    if not store.exists():
        append_trajectories(store, [played() for _ in range(4)])
    config = configuration.load(recipe("demo"), ["--micro_batch", "2", "--model.hidden", "32", "--save_every", "2"])
    section = SftConfig(data=(str(store),), steps=6, batch_size=4, learning_rate=1e-2, options={"use_cpu": True})
    return dataclasses.replace(config, out=str(tmp_path / out), sft=section, **values)


def test_a_run_that_was_cut_ends_as_one_that_was_not(tmp_path: Path) -> None:
    said: list[str] = []

    def cut(text: str) -> None:
        if text.startswith("step 5/"):
            raise KeyboardInterrupt

    whole = teach(run_config(tmp_path, "whole"), said.append)
    with pytest.raises(KeyboardInterrupt):
        teach(run_config(tmp_path, "cut"), cut)
    assert last_checkpoint(tmp_path / "cut").name == "checkpoint-4"  # type: ignore[union-attr]
    resumed = teach(run_config(tmp_path, "cut"), said.append)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("whole", "cut")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    weights = [(taught.model / "model.safetensors").read_bytes() for taught in (whole, resumed)]
    assert weights[0] == weights[1]
    again = teach(run_config(tmp_path, "cut"), said.append)
    assert (again.loss, again.model) == (None, resumed.model)


def test_sft_then_train_is_one_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Experts play in real sandboxes, a tiny model learns from them, reinforcement learning goes on from it."""
    store, taught, trained = (str(tmp_path / name) for name in ("gold.jsonl", "sft", "rl"))
    small = ["--rollout.max_tokens_per_turn", "16", "--rollout.group_size", "2", "--rollout.groups_per_step", "2"]
    small += ["--tasks.limit", "2", "--micro_batch", "4", "--warm_start.steps", "0"]
    play = ["rollout", "--policy", "gold", "--level", "1", "--limit", "2", "--format", "hermes", "--prompt", "brief"]
    assert main([*play, "--out", store]) == 0
    learn = ["sft", str(recipe("demo")), "--out", taught, *small, "--sft.data", store, "--sft.resolved", "true"]
    learn += ["--sft.steps", "4", "--sft.batch_size", "4", "--sft.learning_rate", "4e-3", "--json"]
    assert main(learn) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["taken"] == {"rendered with this model's format": 2}  # scripts are written in bytes
    assert result["model"] == f"{taught}/final"
    words = ["train", str(recipe("demo")), "--out", trained, *small, "--steps", "1", "--model.path", result["model"]]
    assert main(words) == 0
    drifts = [t.counters["drift"] for t in read_trajectories(tmp_path / "rl" / "trajectories.jsonl")]
    assert drifts == [0] * 4


def test_adapters_learn_and_the_whole_model_is_left(tmp_path: Path) -> None:
    """Resumed as if it had not been cut; the frozen weights stay; `final` is the model with `adapter` on it."""
    base = teach(run_config(tmp_path, "base"), lambda text: None).model
    config = run_config(tmp_path, "cut", model=ModelConfig(str(base)), lora=LoraConfig(rank=4, targets=("q_proj",)))

    def cut(text: str) -> None:
        if text.startswith("step 5/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        teach(config, cut)
    taught = teach(config, lambda text: None)
    whole = teach(dataclasses.replace(config, out=str(tmp_path / "whole")), lambda text: None)
    assert (taught.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    before, after = load_model(str(base)).state_dict(), load_model(str(taught.model)).state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if "q_proj" in name}
    adapter = load_model(str(tmp_path / "cut" / "adapter")).state_dict()
    for name, value in after.items():
        torch.testing.assert_close(adapter[name], value)


def test_adapters_on_a_model_that_knows_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank is set, but model\.path is tiny"):
        teach(run_config(tmp_path, "x", lora=LoraConfig(rank=4)), lambda text: None)


def test_sft_without_data_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["sft", str(recipe("demo")), "--out", str(tmp_path / "x")]) == 2
    assert "sft.data names no file" in capsys.readouterr().err
