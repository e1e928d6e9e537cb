"""A training run from its configuration: what is opened, in which order, and what is left behind.

Ownership: one exit stack holds the portal thread, the sandbox provider, the engine and the record, and frees them in
reverse whatever ends the run; an interrupt first cancels the rollouts under way. Before the first step the directory
holds the resolved configuration, after every step its metrics and transcripts, after every `save_every` steps a
checkpoint from which the run goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

import skyenv
from sky_trainer import config as configuration
from sky_trainer.assembly import choose_tasks, make_format, make_pipeline, make_renderer, with_scripts
from sky_trainer.config import Config
from sky_trainer.display import Display
from sky_trainer.engines import HFEngine
from sky_trainer.models import load_model, load_tokenizer
from sky_trainer.policies import corpus, expert_scripts, replayed
from sky_trainer.record import RunRecord, last_checkpoint, quarters, read_metrics
from sky_trainer.rollouts import Rollouts, opened
from sky_trainer.tiny import make_model, make_tokenizer
from sky_trainer.warm_start import supervise
from sky_trainer.weights import SharedWeights
from skyenv.core import SandboxProvider
from skyenv.engines.scripted import ScriptedEngine
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.types import ToolSpec, Trajectory
from skyenv.vector.progress import OnEvent, PipelineEvent

CONFIG, WARM, DONE, FINAL = "config.yaml", "warm_start", ".complete", "final"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to: mean rewards of its first and last quarter of steps, wall seconds of this process."""

    run_dir: Path
    steps: int
    first_quarter: float | None
    last_quarter: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """The open provider and the portal on whose loop it lives."""

    portal: BlockingPortal
    provider: SandboxProvider


def train(config: Config, display: Display) -> Outcome:
    """Run or resume a training run. Raises ConfigError for what the user can change, SkyEnvError otherwise."""
    from sky_trainer import grpo

    started = time.monotonic()
    prepare_libraries(config)
    args = grpo.grpo_config(config)
    tasks = choose_tasks(config.tasks)
    prepare_directory(config)
    checkpoint = last_checkpoint(config.run_dir) if config.resume else None
    with ExitStack() as stack:
        stack.enter_context(display)
        portal = stack.enter_context(start_blocking_portal())
        provider = stack.enter_context(opened(portal, skyenv.connect(config.sandbox.url, config.sandbox.token)))
        model, tokenizer = policy(config, tasks, Sandboxes(portal, provider), display)
        renderer = make_renderer(tokenizer, config.rollout)
        engine = HFEngine(model, renderer.decode, renderer.stop_token_ids, seed=config.seed)
        stack.enter_context(opened(portal, engine))
        first_step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
        record = RunRecord(config.run_dir, first_step, display.step)
        stack.callback(record.close)

        def on_trajectory(trajectory: Trajectory) -> None:
            record.trajectory(trajectory)
            display.trajectory(trajectory)

        pipeline = make_pipeline(engine, renderer, provider, tasks, config.env, config.rollout, on_event=show(display))
        trainer = grpo.SkyGRPOTrainer(
            model,
            args=args,
            tasks=tasks,
            collect=Rollouts(portal, pipeline, on_trajectory).collect,
            weights=SharedWeights(engine),
            processing_class=tokenizer,
            segments=config.rollout.segments,
            on_numbers=record.metrics,
        )
        display.stage(f"GRPO: {config.steps - first_step} steps of {config.rows_per_step} rollouts")
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.save_model(str(config.run_dir / FINAL))
    first, last = quarters(read_metrics(config.run_dir))
    return Outcome(config.run_dir, config.steps, first, last, time.monotonic() - started)


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
    before = configuration.from_mapping(configuration.read_yaml(path))
    changed = [key for key in different_keys(before, config) if key not in ("steps", "save_every", "resume")]
    if changed:
        raise ConfigError(
            f"out: {config.run_dir} holds a run with another {', '.join(changed)}; choose another directory"
        )
    configuration.write(config, path)


def different_keys(left: Config, right: Config) -> list[str]:
    """Dotted keys in which two configurations differ; secrets left aside."""
    a, b = configuration.flat(left), configuration.flat(right)
    return [key for key in a if a[key] != b[key] and key != "sandbox.token"]


def policy(config: Config, tasks: list[SweTask], sandboxes: Sandboxes, display: Display) -> tuple[Any, Any]:
    """Model and tokenizer that GRPO starts from, which are also its reference: given, or warm-started by this run.

    A resumed run starts from the same; the trainer then loads the checkpoint's weights into it.
    """
    warm = config.run_dir / WARM
    if config.warm_start.steps and not (warm / DONE).is_file():
        experts = play_experts(config, tasks, sandboxes, display)
        tools = skyenv.make(config.env.id, tasks=tasks, **config.env.options).tools
        if config.model.path == "tiny":
            texts = corpus((trajectory for trajectory, _ in experts), tools, make_format(config.rollout))
            model, tokenizer = tiny_policy(config, texts, display)
        else:
            model, tokenizer = load_model(config.model.path, config.model.dtype), load_tokenizer(config.model.path)
        warm_up(config, model, tokenizer, tools, experts, display)
        model.save_pretrained(warm)
        tokenizer.save_pretrained(warm)
        (warm / DONE).touch()
    elif config.model.path == "tiny" and not config.warm_start.steps:
        raise ConfigError("model.path: a tiny model knows nothing and needs warm_start.steps above 0")
    source = str(warm) if config.warm_start.steps else config.model.path
    display.stage(f"loading {source}")
    return load_model(source, config.model.dtype), load_tokenizer(source)


def tiny_policy(config: Config, texts: list[str], display: Display) -> tuple[Any, Any]:
    """A new model and a tokenizer trained on `texts`."""
    tokenizer = make_tokenizer(texts, config.model.vocab)
    model = make_model(tokenizer, config.model.hidden, config.model.layers, config.seed)
    size = sum(p.numel() for p in model.parameters())
    display.stage(f"made a model of {size / 1e6:.2f} million parameters and a tokenizer of {len(tokenizer)} ids")
    return model, tokenizer


def play_experts(
    config: Config, tasks: list[SweTask], sandboxes: Sandboxes, display: Display
) -> list[tuple[Trajectory, float]]:
    """Play the right edit and every decoy of each task in real sandboxes; each trajectory with its share of demos."""
    rollout = with_scripts(config.rollout)
    renderer = Renderer(ByteTokenizer(), make_format(rollout))
    scripts = {task.task_id: expert_scripts(task, renderer.format) for task in tasks}
    display.stage(f"warm start: playing {sum(map(len, scripts.values()))} scripted episodes in real sandboxes")
    found: list[tuple[Trajectory, float]] = []
    for number in range(max(map(len, scripts.values()))):
        playing = [task for task in tasks if number < len(scripts[task.task_id])]
        engine = ScriptedEngine(renderer, {task.task_id: scripts[task.task_id][number] for task in playing})
        pipeline = make_pipeline(engine, renderer, sandboxes.provider, playing, config.env, rollout)
        right = config.warm_start.expert_rate
        for group in Rollouts(sandboxes.portal, pipeline).collect(playing, 1):
            decoys = len(scripts[group.task_id]) - 1
            found.append((group.trajectories[0], right if number == 0 else (1 - right) / decoys))
    return found


def warm_up(
    config: Config,
    model: Any,
    tokenizer: Any,
    tools: Sequence[ToolSpec],
    experts: Sequence[tuple[Trajectory, float]],
    display: Display,
) -> None:
    """Supervised steps on what the experts did, as this model's ids."""
    settings = config.warm_start
    solved = sum(bool(trajectory.verdict.get("resolved")) for trajectory, _ in experts)
    display.stage(
        f"warm start: {settings.steps} supervised steps on {len(experts)} episodes; the {solved} that solve their"
        f" task are shown {settings.expert_rate:.0%} of the time"
    )
    renderer = make_renderer(tokenizer, config.rollout)
    loss = supervise(
        model,
        [replayed(trajectory, tools, renderer) for trajectory, _ in experts],
        [weight for _, weight in experts],
        settings,
        pad_id=tokenizer.pad_token_id,
        seed=config.seed,
        on_step=lambda step, loss: display.progress(f"warm start {step}/{settings.steps}, loss {loss:.3f}"),
    )
    display.stage(f"warm start: loss {loss:.3f}")


def show(display: Display) -> OnEvent:
    """A pipeline listener that keeps the display's progress line."""

    def on_event(event: PipelineEvent) -> None:
        progress = event.progress
        display.progress(
            f"rollouts {progress.done}/{progress.total}  init {progress.init}  run {progress.run}  eval {progress.eval}"
        )

    return on_event
