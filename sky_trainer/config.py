"""A training run as data: YAML and command line in, frozen dataclasses out, every mistake named with its fix.

`Config` is the only source of defaults. A value comes from the class, then the YAML file, then `--section.key value`;
what a run resolved to is written into its directory. Keys that TRL owns pass through `grpo:` and are checked against
`GRPOConfig` by `sky_trainer.grpo`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from sky_trainer.advantages import AdvantageConfig
from sky_trainer.files import write_text
from sky_trainer.filters import FilterConfig
from sky_trainer.gpus import assumed
from sky_trainer.paths import from_home, over_paths
from sky_trainer.sections.engine import EngineConfig, check_engine
from sky_trainer.sections.launch import LaunchConfig, check_delivery, check_launch
from sky_trainer.sections.lora import LoraConfig, check_lora
from sky_trainer.sections.metrics import MetricsConfig
from sky_trainer.sections.model import ModelConfig, WarmStartConfig, check_model
from sky_trainer.sections.ray import RayConfig, check_ray
from sky_trainer.sections.sft import SftConfig
from sky_trainer.sections.tasks import LimitsConfig, StageConfig, TasksConfig, check_tasks
from sky_trainer.settings import build, check_least, plain, read_yaml, text_keys, with_overrides
from skyenv import formats
from skyenv.errors import ConfigError
from skyenv.formats import NativeFormat
from skyenv.history import condenser
from skyenv.renderer import HistoryPolicy
from skyenv.samples import Mode
from skyenv.types import Limits, StopReason
from skyenv.vector.stopping import StopAction, check_stop_policy

DEADLINES = tuple(each.name for each in fields(Limits) if each.name.endswith("_timeout"))
_RENDERERS_OWN = frozenset({"conversation", "messages", "tools", "tokenize", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Evaluation while training, `samples` a task every `every` steps (0: never) and, `at_start`, before the first.

    What is not given here is as in `rollout`. The policy with the best score so far is kept in `best`.
    """

    every: int = 0
    at_start: bool = True
    tasks: TasksConfig = field(default_factory=TasksConfig)
    samples: int = 1
    temperature: float | None = None
    limits: LimitsConfig = field(default_factory=LimitsConfig)


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """The environment's id and its keyword arguments, beside `tasks` and `sandbox`."""

    id: str = "SkyRL/SWE-v0"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """Where sandboxes come from: a node server's URL, or none for one in this process."""

    url: str | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How trajectories are made. Seconds and tokens; one optimizer step trains on groups_per_step x group_size.

    `concurrency` bounds live sandboxes, `init_concurrency` and `eval_concurrency` their set-ups and gradings at a time;
    `grade_ahead` more are opened for grading while agents still work; `longest_first` orders each batch by history.
    `format` and `condenser` are names or `package.module:Name` of one's own. `describe_tools` names: the prompt only
    names the tools. `history`, `template_options` are those of `skyenv.renderer.Renderer`; the condenser, its
    thresholds, reminders and the cut of observations those of `skyenv.rollout.TurnRules`, 0 for none; `stuck` is a
    preset of `skyenv.stuck`. `stop_policy` maps a stop reason to keep, mask, zero, penalty or a number that is taken
    off the reward. `deadlines` of infrastructure, by their names in `skyenv.types.Limits`. `rows`: what of a rollout
    trains, see `skyenv.samples.RowRules`; a rollout of several rows is still one sample of its group.
    """

    format: str = "hermes"
    history: HistoryPolicy = "keep"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    describe_tools: Literal["full", "names"] = "full"
    group_size: int = 8
    groups_per_step: int = 4
    temperature: float = 1.0
    max_turns: int = 30
    max_tokens_per_turn: int = 1024
    max_context: int = 16384
    wall_clock: float = 1800.0
    observation_tokens: int = 0
    remind_turns: int = 0
    remind_tokens: int = 0
    remind_seconds: float = 0.0
    condenser: str = "none"
    condense_tokens: int = 0
    condense_turns: int = 0
    stuck: Literal["strict", "skyrl", "off"] = "strict"
    concurrency: int = 32
    init_concurrency: int = 8
    eval_concurrency: int = 8
    grade_ahead: int = 0
    longest_first: bool = False
    rows: Mode = "trajectory"
    stop_policy: Mapping[str, Any] = field(default_factory=dict)
    deadlines: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run, written to the directory `out`. `micro_batch` rows go through the model at once; `cpu_threads` 0
    leaves torch's own choice; `resume` goes on from the newest checkpoint in `out`.

    `sized_for` says on which GPUs it fits, as `--assume-gpu` takes them: 8xH100, or 2x8xH100 for two machines.
    With `stages` each has tasks of its own, `tasks` is not given, and `steps` is their sum unless fewer are asked for.
    Rollouts run up to `staleness` batches ahead of the one that is trained on; 0: none while the trainer steps.
    A process of several that gives no sign of life for `rank_timeout` seconds ends the run; 0: none is watched.
    """

    out: str = "runs/run"
    seed: int = 0
    steps: int = 100
    staleness: int = 0
    save_every: int = 20
    micro_batch: int = 8
    cpu_threads: int = 0
    rank_timeout: float = 300.0
    resume: bool = True
    sized_for: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    stages: tuple[StageConfig, ...] = ()
    env: EnvConfig = field(default_factory=EnvConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    grpo: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.out)

    @property
    def rows_per_step(self) -> int:
        """Trajectories that one optimizer step trains on."""
        return self.rollout.group_size * self.rollout.groups_per_step

    @property
    def curriculum(self) -> tuple[StageConfig, ...]:
        """The stages; without any given, one of `steps` steps on `tasks`."""
        return self.stages or (StageConfig(self.steps, self.tasks),)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `--key value` words. Raises ConfigError naming the field and the fix."""
    return from_mapping(with_overrides(read_yaml(path), overrides, text_keys(Config)))


def from_mapping(data: Mapping[str, Any], *, training: bool = True) -> Config:
    """Build and check a Config from nested mappings. Raises ConfigError naming the field and the fix.

    What only training forbids, such as several segments a rollout, passes without `training`.
    """
    config = build(Config, over_paths(plain(build(Config, data)), from_home))
    if config.stages and "steps" not in data:
        config = dataclasses.replace(config, steps=sum(stage.steps for stage in config.stages))
    _check_run(config)
    _check_rollout(config.rollout)
    check_engine(config.engine, launched=config.launch.servers > 0)
    check_launch(config.launch, config.engine)
    check_delivery(config.engine, config.lora)
    check_ray(config.ray, remote_engine=config.engine.remote, stages=len(config.stages))
    if training:
        _check_curriculum(config)
        _check_staleness(config)
        _check_training(config)
        _check_evaluation(config)
    return config


def limited(rollout: RolloutConfig, limits: LimitsConfig) -> RolloutConfig:
    """The rollout settings with these limits over its own."""
    given = {key: value for key, value in plain(limits).items() if value is not None}
    return dataclasses.replace(rollout, **given)


def to_mapping(config: Config) -> dict[str, Any]:
    """The nested plain values of a config: what `from_mapping` takes."""
    return plain(config)


def write(config: Config, path: Path, heading: str = "") -> None:
    """Write the resolved config as YAML, without tokens, below a comment."""
    data = to_mapping(config)
    data["sandbox"]["token"] = data["engine"]["token"] = None
    write_text(path, heading + yaml.safe_dump(data, sort_keys=False))


def flat(config: Config) -> dict[str, Any]:
    """Every value by its dotted key; lists and the free mappings stay whole."""
    return dict(_flat(Config, to_mapping(config), ""))


def _flat(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _flat(hint, values[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", values[name]


def _check_run(config: Config) -> None:
    check_least({"seed": (config.seed, 0)})
    if not config.out:
        raise ConfigError("out is empty; name the run's directory, such as runs/first")
    if config.sized_for:
        try:
            assumed(config.sized_for)
        except ConfigError as error:
            raise ConfigError(f"sized_for: {error}") from error
    url = config.sandbox.url
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"sandbox.url is {url!r}; it must start with http:// or https://, or be left out")
    check_model(config.model, config.warm_start)
    check_tasks(config.tasks, "tasks")
    check_tasks(config.evaluation.tasks, "evaluation.tasks")


def _check_rollout(rollout: RolloutConfig) -> None:
    values = plain(rollout)
    positive = ("max_turns", "max_tokens_per_turn", "wall_clock", "concurrency", "init_concurrency", "eval_concurrency")
    or_zero = ("observation_tokens", "remind_turns", "remind_tokens", "remind_seconds", "condense_tokens")
    check_least({f"rollout.{name}": (values[name], 1) for name in positive})
    check_least({f"rollout.{name}": (values[name], 0) for name in (*or_zero, "condense_turns", "grade_ahead")})
    if rollout.max_context <= rollout.max_tokens_per_turn:
        raise ConfigError(
            f"rollout.max_context is {rollout.max_context}; it must be above rollout.max_tokens_per_turn, which is"
            f" {rollout.max_tokens_per_turn}, or no prompt fits beside an answer"
        )
    if rollout.condense_turns == 1:
        raise ConfigError("rollout.condense_turns is 1; it must be at least 2, since the last turn stays, or 0")
    for name, seconds in rollout.deadlines.items():
        if name not in DEADLINES:
            raise ConfigError(f"rollout.deadlines.{name}: choose of {', '.join(DEADLINES)}")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(f"rollout.deadlines.{name} is {seconds!r}; write a number of seconds above 0")
    for name in _RENDERERS_OWN.intersection(rollout.template_options):
        raise ConfigError(f"rollout.template_options.{name}: the renderer sets it itself; leave it out")
    try:
        check_stop_policy(typing.cast("Mapping[StopReason, StopAction]", rollout.stop_policy))
        native = isinstance(formats.get(rollout.format), NativeFormat)
        condensing = condenser(rollout.condenser) is not None
    except ConfigError as error:
        raise ConfigError(f"rollout.{error}") from error
    if native and rollout.describe_tools == "names":
        raise ConfigError(f"rollout.describe_tools is names, but {rollout.format} writes no tools; set it to full")
    for name in ("condense_tokens", "condense_turns"):
        if values[name] and not condensing:
            raise ConfigError(f"rollout.{name} is {values[name]}, but rollout.condenser is none; name one or write 0")


def _check_training(config: Config) -> None:
    rollout = config.rollout
    check_least(
        {
            "steps": (config.steps, 1),
            "save_every": (config.save_every, 1),
            "staleness": (config.staleness, 0),
            "micro_batch": (config.micro_batch, 1),
            "rollout.group_size": (rollout.group_size, 2),
            "rollout.groups_per_step": (rollout.groups_per_step, 1),
            "cpu_threads": (config.cpu_threads, 0),
            "rank_timeout": (config.rank_timeout, 0),
        }
    )
    if rollout.temperature <= 0:
        raise ConfigError(f"rollout.temperature is {rollout.temperature}; training needs a positive one, usually 1.0")
    if config.rows_per_step % config.micro_batch:
        raise ConfigError(
            f"micro_batch is {config.micro_batch}, which does not divide the {config.rows_per_step} rows of a step"
            " (rollout.group_size x rollout.groups_per_step)"
        )
    if isinstance(formats.get(rollout.format), NativeFormat):
        raise ConfigError(
            f"rollout.format is {rollout.format}, whose calls a server reports beside the text; training needs one"
            " written as text, such as hermes"
        )
    check_lora(config.lora)
    check_least({"filter.rounds": (config.filter.rounds, 0)})
    if rollout.rows in ("segment", "turn") and config.grpo.get("use_adaptive_entropy"):
        raise ConfigError(
            "grpo.use_adaptive_entropy measures micro-batches of equal rows; with rollout.rows segment or turn set"
            " grpo.entropy_coef instead"
        )
    _check_segments(rollout)


def _check_curriculum(config: Config) -> None:
    if not config.stages:
        return
    for place, stage in enumerate(config.stages):
        check_least({f"stages[{place}].steps": (stage.steps, 1)})
        check_tasks(stage.tasks, f"stages[{place}].tasks")
        _check_limited(config, stage.limits, f"stages[{place}].limits")
    total = sum(stage.steps for stage in config.stages)
    if config.tasks != TasksConfig():
        raise ConfigError("tasks: every stage names its own; move it below stages, or leave stages out")
    if config.steps > total:
        raise ConfigError(f"steps is {config.steps}, but the stages have {total} in all; raise theirs or leave it out")


def _check_staleness(config: Config) -> None:
    if config.staleness and config.engine.sync == "shared":
        raise ConfigError(
            f"engine.sync is shared, but staleness is {config.staleness}: rollouts would sample from weights that the"
            " trainer is changing; leave engine.sync at auto"
        )


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    check_least({"evaluation.every": (evaluation.every, 0), "evaluation.samples": (evaluation.samples, 1)})
    if evaluation.temperature is not None:
        check_least({"evaluation.temperature": (evaluation.temperature, 0)})
    _check_limited(config, evaluation.limits, "evaluation.limits")


def _check_limited(config: Config, limits: LimitsConfig, key: str) -> None:
    try:
        _check_rollout(limited(config.rollout, limits))
    except ConfigError as error:
        raise ConfigError(f"{key}: with these, {error}") from error


def _check_segments(rollout: RolloutConfig) -> None:
    """Several segments a rollout are refused before the first one is made."""
    splitting = [("rollout.history", rollout.history, "keep"), ("rollout.condenser", rollout.condenser, "none")]
    for key, value, whole in splitting:
        if value != whole and rollout.rows == "trajectory":
            raise ConfigError(
                f"{key} is {value}, which makes several segments of a rollout; set rollout.rows to segment, which"
                f" trains on all of them, or to last, or {key} to {whole}"
            )


def defaults_text() -> str:
    """Every key with its default, one a line."""
    return "\n".join(f"  {key}: {value!r}" for key, value in flat(Config()).items())
