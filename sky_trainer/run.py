"""A training run from its configuration: what is opened, in which order, and what is left behind.

Ownership: one exit stack holds the portal thread, the sandbox provider, the engine and the record, and frees them in
reverse whatever ends the run; an interrupt first cancels the rollouts under way. Before the first step the directory
holds the resolved configuration, after every step its metrics and transcripts, after every `save_every` steps a
checkpoint from which the run goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio.from_thread import start_blocking_portal

import skyenv
from sky_trainer.ahead import Ahead
from sky_trainer.assembly import choose_tasks, make_pipeline, make_renderer, make_widths
from sky_trainer.config import Config, RolloutConfig, limited
from sky_trainer.curriculum import Plan, Stage, make_plan
from sky_trainer.display import Display
from sky_trainer.files import appearing
from sky_trainer.following import check_ranks, follow
from sky_trainer.identity import prepare_directory
from sky_trainer.in_loop import InLoop
from sky_trainer.metering import Metering
from sky_trainer.models import beyond_positions
from sky_trainer.peers import watched_ranks
from sky_trainer.record import (
    RunRecord,
    consumed_tasks,
    last_checkpoint,
    quarters,
    read_metrics,
    stored_trajectories,
)
from sky_trainer.rollouts import PlannedRollouts, opened
from sky_trainer.sampling import Place, opened_sampling
from sky_trainer.sections.lora import with_adapters
from sky_trainer.starting import Sandboxes, starting_policy
from sky_trainer.watch import Watch
from skyenv.core import Engine, SandboxProvider
from skyenv.envs.swe.records import require_records
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError
from skyenv.renderer import Renderer
from skyenv.types import Trajectory
from skyenv.vector.lanes import Stages
from skyenv.vector.metrics import Meter
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.progress import OnEvent

if TYPE_CHECKING:
    from sky_trainer.cluster import Cluster

FINAL = "final"
NOT_EXPORTED = ("optimizer*", "scheduler*", "scaler*", "rng_state*", "trainer_state.json", "training_args.bin")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to: mean rewards of its first and last quarter of steps, wall seconds of this process."""

    run_dir: Path
    steps: int
    first_quarter: float | None
    last_quarter: float | None
    seconds: float


def train(config: Config, display: Display, cluster: Cluster | None = None) -> Outcome:
    """Run or resume a training run, with servers and workers on `cluster` if there is one.

    Raises ConfigError for what the user can change, SkyEnvError otherwise.
    """
    from sky_trainer import grpo

    started = time.monotonic()
    prepare_libraries(config)
    args = grpo.grpo_config(config)
    check_ranks(config, args)
    plan = planned(config, *grpo.batch_shape(args))
    with watched_ranks(config.rank_timeout):
        if args.process_index:
            follow(config, args, plan, config.run_dir / FINAL)
        else:
            lead(config, display, args, plan, cluster)
    return outcome(config, started)


def lead(config: Config, display: Display, args: Any, plan: Plan, cluster: Cluster | None) -> None:
    """Rank 0: make the directory ready, then train from where the run stands."""
    evaluated = choose_tasks(config.evaluation.tasks) if config.evaluation.every else []
    require_records(evaluated, config.evaluation.tasks.source)
    prepare_directory(config)
    checkpoint = last_checkpoint(config.run_dir) if config.resume else None
    first_step = step_of(checkpoint)
    check_consumed(config.run_dir, plan, first_step)
    args.distributed_state.wait_for_everyone()
    if checkpoint is not None and first_step >= config.steps:
        finish(config.run_dir, checkpoint)
        return
    take_steps(config, display, Prepared(args, plan, evaluated, checkpoint, cluster))


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is settled before anything is opened: TRL's arguments, what is played and evaluated, where to go on."""

    args: Any
    plan: Plan
    evaluated: Sequence[SweTask]
    checkpoint: Path | None
    cluster: Cluster | None


def take_steps(config: Config, display: Display, prepared: Prepared) -> None:
    """Open everything, train from the checkpoint to the end, export the policy."""
    from sky_trainer import grpo

    args, plan, evaluated, checkpoint = prepared.args, prepared.plan, prepared.evaluated, prepared.checkpoint
    serves, first_step = plan.serves, step_of(checkpoint)
    with ExitStack() as stack:
        stack.enter_context(display)
        portal = stack.enter_context(start_blocking_portal())
        provider = stack.enter_context(opened(portal, skyenv.connect(config.sandbox.url, config.sandbox.token)))
        model, tokenizer = starting_policy(config, plan.tasks, Sandboxes(portal, provider), display)
        beyond = beyond_positions(model.config, max(stage.rollout.max_context for stage in plan.stages))
        if beyond:
            display.stage(beyond)
        args.distributed_state.wait_for_everyone()
        model = with_adapters(model, config.lora)
        renderer = make_renderer(tokenizer, config.rollout)
        sampling = stack.enter_context(
            opened_sampling(config, Place(portal, display, prepared.cluster), model, renderer)
        )
        record = RunRecord(config.run_dir, first_step, display.step)
        stack.callback(record.close)
        metering = Metering(config.run_dir, config.metrics, workers=sampling.workers)
        stack.enter_context(opened(portal, metering.opened()))
        making = Making(
            config,
            sampling.engine,
            renderer,
            provider,
            Stages(make_widths(config.rollout)),
            metering.meter,
            display.event,
        )

        pipelines = [sampling.workers or making.training(stage) for stage in plan.stages]
        ahead = playing(config, plan, pipelines, renderer, record, display)
        stack.enter_context(opened(portal, ahead.opened()))
        rollouts = PlannedRollouts(portal, ahead, lambda: sampling.weights.version, metering, first_step // serves)
        evaluation = None
        if config.evaluation.every:
            evaluation = InLoop(config.evaluation, evaluated, making.evaluation(evaluated), portal, record)
        watch = Watch(record, display, rollouts, evaluation, config.filter, serves)
        trainer = grpo.SkyGRPOTrainer(
            model,
            args=args,
            tasks=plan.tasks,
            order=plan.order(),
            collect=watch.collect,
            weights=sampling.weights,
            processing_class=tokenizer,
            rows=config.rollout.rows,
            advantage=config.advantage,
            filters=config.filter,
            on_numbers=watch.numbers,
            evaluation=evaluation,
        )
        display.stage(f"GRPO: {config.steps - first_step} steps of {config.rows_per_step} rollouts")
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.export(config.run_dir / FINAL)


def playing(
    config: Config,
    plan: Plan,
    pipelines: Sequence[Any],
    renderer: Renderer,
    record: RunRecord,
    display: Display,
) -> Ahead:
    """What plays the plan, with what a killed run had finished, and writes each trajectory down."""
    serves = plan.serves
    stored = stored_trajectories(config.run_dir, record.first_step)

    def on_trajectory(batch: int, trajectory: Trajectory) -> None:
        if trajectory.exact and trajectory.failure is None:
            trajectory.counters["drift"] = renderer.drift(trajectory)
        record.trajectory(trajectory, batch * serves + 1)
        display.trajectory(trajectory)

    return Ahead(
        plan,
        pipelines,
        config.rollout.group_size,
        staleness=config.staleness,
        stored={(step - 1) // serves: found for step, found in stored.items()},
        on_trajectory=on_trajectory,
    )


def planned(config: Config, groups: int, serves: int) -> Plan:
    """What is played, in batches of `groups` that serve so many steps. ConfigError where checkpoints split one."""
    if config.save_every % serves:
        raise ConfigError(
            f"save_every is {config.save_every}; a batch of rollouts serves {serves} steps, write a multiple of it"
        )
    return make_plan(config, groups, serves)


@dataclass(frozen=True, slots=True)
class Making:
    """Makes the pipelines of a run; they share engine, sandboxes and slots."""

    config: Config
    engine: Engine
    renderer: Renderer
    provider: SandboxProvider
    stages: Stages
    meter: Meter
    on_event: OnEvent

    def pipeline(self, tasks: Sequence[SweTask], rollout: RolloutConfig, **options: Any) -> RolloutPipeline:
        """A pipeline over these tasks."""
        return make_pipeline(
            self.engine, self.renderer, self.provider, tasks, self.config.env, rollout, stages=self.stages, **options
        )

    def training(self, stage: Stage) -> RolloutPipeline:
        """That of a stage of the curriculum, which keeps the display's progress line and is counted."""
        return self.pipeline(stage.tasks, stage.rollout, meter=self.meter, on_event=self.on_event)

    def evaluation(self, tasks: Sequence[SweTask]) -> RolloutPipeline:
        """That of the evaluation."""
        settings = self.config.evaluation
        rollout = limited(self.config.rollout, settings.limits)
        if settings.temperature is not None:
            rollout = dataclasses.replace(rollout, temperature=settings.temperature)
        return self.pipeline(tasks, rollout)


def step_of(checkpoint: Path | None) -> int:
    """The step that a checkpoint was written after; 0 for none."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def check_consumed(run_dir: Path, plan: Plan, first_step: int) -> None:
    """ConfigError unless what was trained on up to `first_step` is what the plan says."""
    for row in consumed_tasks(run_dir):
        number = (row["step"] - 1) // plan.serves
        if row["step"] > first_step or number >= plan.length:
            continue
        planned = [task.task_id for task in plan.batch(number).tasks]
        if row["tasks"] != planned:
            raise ConfigError(
                f"out: {run_dir} trained on other tasks in step {row['step']} than this configuration plans; the task"
                " set changed since, choose another directory"
            )


def finish(run_dir: Path, checkpoint: Path) -> None:
    """Export the policy of a run that was killed between its last step and that."""
    if (run_dir / FINAL).exists():
        return
    with appearing(run_dir / FINAL) as partial:
        shutil.copytree(checkpoint, partial, ignore=shutil.ignore_patterns(*NOT_EXPORTED))


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
