"""A training run from its configuration: what is opened, in which order, and what is left behind.

Ownership: one exit stack holds the portal thread, the sandbox provider, the engine and the record, and frees them in
reverse whatever ends the run; an interrupt first cancels the rollouts under way. Before the first step the directory
holds the resolved configuration, after every step its metrics and transcripts, after every `save_every` steps a
checkpoint from which the run goes on.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from anyio.from_thread import start_blocking_portal

import skyenv
from sky_trainer import config as configuration
from sky_trainer.assembly import choose_tasks, make_pipeline, make_renderer
from sky_trainer.config import Config
from sky_trainer.display import Display
from sky_trainer.filters import Resampling
from sky_trainer.opening import opened_engine
from sky_trainer.record import RunRecord, last_checkpoint, quarters, read_metrics
from sky_trainer.rollouts import Rollouts, opened
from sky_trainer.sections.lora import with_adapters
from sky_trainer.settings import read_yaml
from sky_trainer.starting import Sandboxes, starting_policy
from skyenv.envs.swe.records import require_records
from skyenv.errors import ConfigError
from skyenv.types import Trajectory
from skyenv.vector.progress import OnEvent, PipelineEvent

CONFIG, FINAL = "config.yaml", "final"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to: mean rewards of its first and last quarter of steps, wall seconds of this process."""

    run_dir: Path
    steps: int
    first_quarter: float | None
    last_quarter: float | None
    seconds: float


def train(config: Config, display: Display) -> Outcome:
    """Run or resume a training run. Raises ConfigError for what the user can change, SkyEnvError otherwise."""
    from sky_trainer import grpo

    started = time.monotonic()
    prepare_libraries(config)
    args = grpo.grpo_config(config)
    if args.world_size > 1:
        raise ConfigError("training runs in one process; start it without torchrun or accelerate launch")
    tasks = choose_tasks(config.tasks)
    require_records(tasks, config.tasks.source)
    prepare_directory(config)
    checkpoint = last_checkpoint(config.run_dir) if config.resume else None
    first_step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
    if first_step >= config.steps:
        return outcome(config, started)
    with ExitStack() as stack:
        stack.enter_context(display)
        portal = stack.enter_context(start_blocking_portal())
        provider = stack.enter_context(opened(portal, skyenv.connect(config.sandbox.url, config.sandbox.token)))
        model, tokenizer = starting_policy(config, tasks, Sandboxes(portal, provider), display)
        model = with_adapters(model, config.lora)
        renderer = make_renderer(tokenizer, config.rollout)
        engine, weights = stack.enter_context(opened_engine(config, portal, model, renderer))
        record = RunRecord(config.run_dir, first_step, display.step)
        stack.callback(record.close)

        def on_trajectory(trajectory: Trajectory) -> None:
            if trajectory.exact and trajectory.failure is None:
                trajectory.counters["drift"] = renderer.drift(trajectory)
            record.trajectory(trajectory)
            display.trajectory(trajectory)

        pipeline = make_pipeline(engine, renderer, provider, tasks, config.env, config.rollout, on_event=show(display))
        rollouts = Rollouts(portal, pipeline, on_trajectory)
        trainer = grpo.SkyGRPOTrainer(
            model,
            args=args,
            tasks=tasks,
            collect=Resampling(rollouts.collect, rollouts.collect, tasks, config.filter, config.seed),
            weights=weights,
            processing_class=tokenizer,
            rows=config.rollout.rows,
            advantage=config.advantage,
            filters=config.filter,
            on_numbers=record.metrics,
        )
        display.stage(f"GRPO: {config.steps - first_step} steps of {config.rows_per_step} rollouts")
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.save_model(str(config.run_dir / FINAL))
    return outcome(config, started)


def outcome(config: Config, started: float) -> Outcome:
    """What the run directory says."""
    rows = read_metrics(config.run_dir)
    first, last = quarters(rows)
    return Outcome(config.run_dir, len(rows), first, last, time.monotonic() - started)


def prepare_libraries(config: Config) -> None:
    """Thread count, seeds and the libraries' chatter; must run before a model is made."""
    import torch
    import transformers

    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    transformers.set_seed(config.seed)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)  # it prints whole rows when a reward is None


def prepare_directory(config: Config) -> None:
    """Make the run directory, or check that it holds this very run. ConfigError otherwise."""
    path = config.run_dir / CONFIG
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(config.run_dir.iterdir()):
                raise ConfigError(f"out: {config.run_dir} holds other files; choose an empty or new directory")
            configuration.write(config, path)
    except OSError as error:
        raise ConfigError(f"out: cannot write to {config.run_dir}: {error.strerror}") from error
    if not config.resume and read_metrics(config.run_dir):
        raise ConfigError(f"out: {config.run_dir} holds a run already; choose another or leave resume at true")
    before = configuration.from_mapping(read_yaml(path))
    may_change = ("steps", "save_every", "resume")
    changed = [key for key in different_keys(before, config) if key not in may_change and not key.startswith("engine.")]
    if changed:
        raise ConfigError(
            f"out: {config.run_dir} holds a run with another {', '.join(changed)}; choose another directory"
        )
    configuration.write(config, path)


def different_keys(left: Config, right: Config) -> list[str]:
    """Dotted keys in which two configurations differ; secrets left aside."""
    a, b = configuration.flat(left), configuration.flat(right)
    return [key for key in a if a[key] != b[key] and key != "sandbox.token"]


def show(display: Display) -> OnEvent:
    """A pipeline listener that keeps the display's progress line."""

    def on_event(event: PipelineEvent) -> None:
        progress = event.progress
        display.progress(
            f"rollouts {progress.done}/{progress.total}  init {progress.init}  run {progress.run}  eval {progress.eval}"
        )

    return on_event
