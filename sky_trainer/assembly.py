"""From configuration to the parts that make trajectories: tasks, renderer, pipeline. Opens nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import skyenv
from sky_trainer.config import EnvConfig, RolloutConfig
from sky_trainer.sections.tasks import TasksConfig
from sky_trainer.tiny import ToolNames
from skyenv import formats
from skyenv.core import Engine, Env, SandboxProvider
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError
from skyenv.formats.contract import Format
from skyenv.history import condenser
from skyenv.renderer import Renderer, Tokenizer
from skyenv.rollout import TurnRules
from skyenv.stuck import stuck_rule
from skyenv.types import Limits, SamplingParams, StopReason
from skyenv.vector.pipeline import Durations, RolloutPipeline, StageWidths


def choose_tasks(config: TasksConfig) -> list[SweTask]:
    """Load the set and cut it down. ConfigError for an unknown id and when nothing is left."""
    tasks = load_tasks(config.source)
    known = {task.task_id: task for task in tasks}
    for task_id in config.ids:
        if task_id not in known:
            raise ConfigError(
                f"tasks.ids: {config.source} has no task {task_id!r}; `skyenv tasks list {config.source}` names all"
            )
    chosen = [known[task_id] for task_id in config.ids] if config.ids else tasks
    if config.level is not None:
        chosen = [task for task in chosen if task.level == config.level]
    chosen = chosen[: config.limit]
    if not chosen:
        levels = sorted({task.level for task in tasks})
        raise ConfigError(f"tasks: nothing is left of {config.source}; levels are {', '.join(map(str, levels))}")
    return chosen


def make_format(config: RolloutConfig) -> Format:
    """The tool-call format, with the tools described in full or by name."""
    format = formats.get(config.format)
    return ToolNames(format) if config.describe_tools == "names" else format


def make_renderer(tokenizer: Tokenizer, config: RolloutConfig) -> Renderer:
    """The renderer for a model's tokenizer.

    ConfigError when its chat template cannot be used exactly or knows nothing of an option for it.
    """
    template = str(getattr(tokenizer, "chat_template", ""))
    for name in config.template_options:
        if name not in template:
            raise ConfigError(f"rollout.template_options.{name}: the model's chat template has no such variable")
    return Renderer(tokenizer, make_format(config), history=config.history, template_options=config.template_options)


def make_rules(config: RolloutConfig) -> TurnRules:
    """How turns are judged, reminded and condensed."""
    return TurnRules(
        stuck=stuck_rule(config.stuck),
        remind_turns=config.remind_turns,
        remind_tokens=config.remind_tokens,
        remind_seconds=config.remind_seconds,
        observation_tokens=config.observation_tokens,
        condenser=condenser(config.condenser),
        condense_tokens=config.condense_tokens,
        condense_turns=config.condense_turns,
    )


def make_pipeline(
    engine: Engine,
    renderer: Renderer,
    provider: SandboxProvider,
    tasks: Sequence[SweTask],
    env: EnvConfig,
    rollout: RolloutConfig,
    **options: Any,
) -> RolloutPipeline:
    """The pipeline over environments that share one sandbox provider; `options` are the pipeline's own."""

    def make_env() -> Env:
        return skyenv.make(env.id, tasks=tasks, sandbox=provider, max_turns=rollout.max_turns, **env.options)

    probe_environment(env, tasks)
    limits = Limits(
        max_turns=rollout.max_turns,
        max_tokens_per_turn=rollout.max_tokens_per_turn,
        max_context=rollout.max_context,
        wall_clock=rollout.wall_clock,
        **rollout.deadlines,
    )
    return RolloutPipeline(
        engine=engine,
        make_env=make_env,
        renderer=renderer,
        limits=limits,
        sampling=SamplingParams(temperature=rollout.temperature, max_tokens=rollout.max_tokens_per_turn),
        rules=make_rules(rollout),
        widths=make_widths(rollout),
        longest_first=Durations() if rollout.longest_first else None,
        stop_policy={StopReason(reason): action for reason, action in rollout.stop_policy.items()},
        **options,
    )


def make_widths(rollout: RolloutConfig) -> StageWidths:
    """How many trajectories each stage serves at once."""
    return StageWidths(
        init=rollout.init_concurrency,
        run=rollout.concurrency,
        eval=rollout.eval_concurrency,
        live=rollout.concurrency,
        ahead=rollout.grade_ahead,
    )


def probe_environment(env: EnvConfig, tasks: Sequence[SweTask]) -> None:
    """Make the environment once, so that a wrong option is an error before anything starts."""
    try:
        skyenv.make(env.id, tasks=tasks, **env.options)
    except TypeError as error:
        raise ConfigError(f"env.options: {error}") from error


def with_scripts(rollout: RolloutConfig) -> RolloutConfig:
    """The rollout settings under which a script is never cut short: bytes are tokens, patches may be long.

    A script remembers everything, and no condenser may ask it for a summary.
    """
    return dataclasses.replace(
        rollout,
        max_tokens_per_turn=1 << 20,
        max_context=1 << 24,
        max_turns=1000,
        observation_tokens=0,
        condenser="none",
        condense_tokens=0,
        condense_turns=0,
    )
