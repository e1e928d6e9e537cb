"""A supervised run from its configuration: demonstrations in, a model directory out that `train` goes on from.

The run directory is laid out like one of `train`: the resolved configuration before the first step, metrics after
every step, a checkpoint after every `save_every`, the model and its tokenizer in `final` at the end, and in
`lessons.json` what was learnt from and what was left out. A run that was cut goes on from its newest checkpoint.
With `lora` only adapters learn; `final` is the whole model with them merged into it, `adapter` holds them alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import skyenv
from sky_trainer.assembly import choose_tasks, make_format, make_renderer
from sky_trainer.config import Config
from sky_trainer.demonstrations import Demonstration, read_demonstrations
from sky_trainer.identity import prepare_directory
from sky_trainer.lessons import AsWritten, Classroom, Lessons
from sky_trainer.models import load_model, load_tokenizer
from sky_trainer.record import RunRecord, last_checkpoint
from sky_trainer.run import FINAL, prepare_libraries
from sky_trainer.sections.lora import with_adapters
from sky_trainer.tiny import make_model, make_tokenizer
from skyenv.errors import ConfigError
from skyenv.renderer import Renderer
from skyenv.types import ToolSpec

LESSONS, ADAPTER = "lessons.json", "adapter"


@dataclass(frozen=True, slots=True)
class Taught:
    """What a supervised run came to: where the model is, optimizer steps, the last loss, seconds of this process."""

    model: Path
    steps: int
    loss: float | None
    lessons: Lessons
    seconds: float


def teach(config: Config, say: Callable[[str], None]) -> Taught:
    """Run or resume supervised training; `say` hears a line a step. Raises ConfigError for what the user can change."""
    from sky_trainer import sft

    started = time.monotonic()
    if not config.sft.data:
        raise ConfigError("sft.data names no file; give --sft.data FILE.jsonl, of trajectories or transcripts")
    if config.lora.rank and config.model.path == "tiny":
        raise ConfigError(
            "lora.rank is set, but model.path is tiny: a model made here knows nothing that adapters could build on;"
            " set lora.rank to 0, or name a model"
        )
    prepare_libraries(config)
    demonstrations = list(read_demonstrations(config.sft.data))
    tools = _environment_tools(config)
    model, tokenizer = _policy(config, demonstrations, tools)
    lessons = _classroom(config, tokenizer, tools).lessons(demonstrations, config.sft)
    args = sft.sft_config(config, len(lessons.segments))
    model = with_adapters(model, config.lora)
    say(lessons.describe())
    if args.process_index == 0:
        prepare_directory(config)
        counted = {"taken": lessons.taken, "left_out": lessons.left_out, "rows": len(lessons.segments)}
        (config.run_dir / LESSONS).write_text(json.dumps(counted, indent=1) + "\n", encoding="utf-8")
    checkpoint = last_checkpoint(config.run_dir) if config.resume else None
    first = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
    losses: list[float] = []
    if first < args.max_steps or not (config.run_dir / FINAL / "config.json").is_file():
        record = RunRecord(config.run_dir, first) if args.process_index == 0 else None

        def on_numbers(step: int, numbers: Any) -> None:
            losses.append(float(numbers["loss"]))
            if record is not None:
                record.metrics(step, numbers)
                say(f"step {step}/{args.max_steps}  loss {losses[-1]:.4f}")

        trainer = sft.SkySFTTrainer(
            model, lessons.segments, args=args, processing_class=tokenizer, on_numbers=on_numbers
        )
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            trainer.export(config.run_dir / FINAL, config.run_dir / ADAPTER)
        finally:
            if record is not None:
                record.close()
    return Taught(
        config.run_dir / FINAL, args.max_steps, losses[-1] if losses else None, lessons, time.monotonic() - started
    )


def _environment_tools(config: Config) -> Callable[[], tuple[ToolSpec, ...]]:
    """The tools of the environment, which is made when they are asked for first."""
    made: list[tuple[ToolSpec, ...]] = []

    def tools() -> tuple[ToolSpec, ...]:
        if not made:
            env = skyenv.make(config.env.id, tasks=choose_tasks(config.tasks), **config.env.options)
            made.append(tuple(env.tools))
        return made[0]

    return tools


def _policy(
    config: Config, demonstrations: Sequence[Demonstration], tools: Callable[[], tuple[ToolSpec, ...]]
) -> tuple[Any, Any]:
    """The given model, or a tiny one whose tokenizer is trained on what it will read and write."""
    if config.model.path != "tiny":
        return load_model(config.model.path, config.model.dtype), load_tokenizer(config.model.path)
    tokenizer = make_tokenizer(_texts(config, demonstrations, tools), config.model.vocab)
    return make_model(tokenizer, config.model.hidden, config.model.layers, config.seed), tokenizer


def _texts(
    config: Config, demonstrations: Sequence[Demonstration], tools: Callable[[], tuple[ToolSpec, ...]]
) -> list[str]:
    texts = []
    format = make_format(config.rollout)
    for demonstration in demonstrations:
        described = "" if demonstration.whole else format.render_tools(demonstration.tools or tools())
        texts += [described, *(message.content for message in demonstration.prompt)]
        for said in demonstration.said:
            texts += [said.text, *(text for text, _ in said.results)]
            texts += [format.render_call(call) for call in said.calls if demonstration.beside]
    return texts


def _classroom(config: Config, tokenizer: Any, tools: Callable[[], tuple[ToolSpec, ...]]) -> Classroom:
    rollout = config.rollout
    plain = Renderer(
        tokenizer,
        AsWritten(make_format(rollout)),
        history=rollout.history,
        template_options=rollout.template_options,
    )
    return Classroom(make_renderer(tokenizer, rollout), plain, len(tokenizer), tools)
