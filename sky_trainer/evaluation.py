"""Evaluate a policy on a task set: k samples a task through the pipeline, and what they came to.

The engine, its pool and the sandboxes are open only inside `evaluate`. Every sample counts: one that infrastructure
spoiled is listed under its failure's kind, is not resolved, and is run again when the evaluation is continued.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio

import skyenv
from sky_trainer.assembly import make_format, make_pipeline, make_renderer, with_scripts
from sky_trainer.config import EnvConfig, RolloutConfig, SandboxConfig
from sky_trainer.evaluated import append_sample, read_samples
from sky_trainer.metering import Metering
from sky_trainer.policies import empty_script, gold_script, read_scripts
from skyenv.core import Engine, SandboxProvider
from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.scripted import Script, ScriptedEngine
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError
from skyenv.formats import NativeFormat
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.types import Trajectory
from skyenv.vector.metrics import Meter
from skyenv.vector.pipeline import RolloutPipeline

PolicyName = Literal["gold", "empty", "scripted", "openai", "hf"]
UNREACHABLE_SECONDS = 15.0
BYTES_PER_TOKEN = 4
POLICIES: tuple[PolicyName, ...] = ("gold", "empty", "scripted", "openai", "hf")


@dataclass(frozen=True, slots=True)
class Policy:
    """Who plays. `model`: a path or hub name (hf), a served name (openai); `url`: of an OpenAI-compatible server."""

    name: PolicyName
    model: str = ""
    url: str = ""
    script: Path | None = None

    def __post_init__(self) -> None:
        if self.name == "openai" and not self.url:
            raise ConfigError("--policy openai needs --url of an OpenAI-compatible server")
        if self.name == "hf" and not self.model:
            raise ConfigError("--policy hf needs --model, a directory or hub name of a causal language model")
        if self.name == "scripted" and self.script is None:
            raise ConfigError("--policy scripted needs --script, a YAML file of turns")


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """Everything that an evaluation needs. `seed` is the hf policy's.

    `out` is a file for the transcripts; samples of the same evaluation in it are not run again unless `fresh`.
    """

    tasks: Sequence[SweTask]
    policy: Policy
    samples: int = 1
    env: EnvConfig = field(default_factory=EnvConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    seed: int = 0
    out: Path | None = None
    fresh: bool = False

    @property
    def mark(self) -> str:
        """Names policy and settings, whatever the tasks and the number of samples."""
        settings = [self.policy, self.env, dataclasses.replace(self.rollout, concurrency=1), self.seed]
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


async def evaluate(
    plan: EvalPlan, on_trajectory: Callable[[Trajectory], None], metering: Metering | None = None
) -> list[Trajectory]:
    """Run what `plan.out` does not hold yet and return every sample, in the order of tasks and samples.

    `on_trajectory` hears of each sample as it ends, `metering` counts what is run. Raises SkyEnvError
    when too much fails.
    """
    done = await anyio.to_thread.run_sync(kept_samples, plan)
    every = {(sample.task_id, sample.sample_index): sample for sample in done}
    work = missing_samples(plan.tasks, plan.samples, every)
    if work:
        async with AsyncExitStack() as stack:
            provider = await stack.enter_async_context(skyenv.connect(plan.sandbox.url, plan.sandbox.token))
            metering = metering or Metering(None)
            await stack.enter_async_context(metering.opened())
            pipeline = await _open_pipeline(plan, provider, stack, metering.meter)
            for samples, tasks in work:
                run = await stack.enter_async_context(pipeline.run(tasks, len(samples)))
                async for trajectory in run:
                    sample = dataclasses.replace(trajectory, sample_index=samples[trajectory.sample_index])
                    every[sample.task_id, sample.sample_index] = sample
                    on_trajectory(sample)
                    if plan.out is not None:
                        await anyio.to_thread.run_sync(append_sample, plan.out, sample, plan.mark)
                    await metering.trajectory_ended()
    order = {task.task_id: place for place, task in enumerate(plan.tasks)}
    return sorted(every.values(), key=lambda sample: (order[sample.task_id], sample.sample_index))


def kept_samples(plan: EvalPlan) -> list[Trajectory]:
    """The samples of this very evaluation that `plan.out` holds from an earlier run."""
    if plan.out is None or plan.fresh or not plan.out.exists():
        return []
    ids = {task.task_id for task in plan.tasks}
    samples = read_samples(plan.out, plan.mark)
    return [s for s in samples if s.failure is None and s.task_id in ids and s.sample_index < plan.samples]


def missing_samples(
    tasks: Sequence[SweTask], samples: int, done: Container[tuple[str, int]]
) -> list[tuple[tuple[int, ...], list[SweTask]]]:
    """What is left to do: tasks by the sample indices that they lack."""
    work: dict[tuple[int, ...], list[SweTask]] = {}
    for task in tasks:
        lacking = tuple(index for index in range(samples) if (task.task_id, index) not in done)
        if lacking:
            work.setdefault(lacking, []).append(task)
    return list(work.items())


async def _open_pipeline(
    plan: EvalPlan, provider: SandboxProvider, stack: AsyncExitStack, meter: Meter
) -> RolloutPipeline:
    policy, rollout = plan.policy, plan.rollout
    engine: Engine
    native = isinstance(make_format(rollout), NativeFormat)
    if policy.name == "hf":
        if native:
            raise ConfigError(f"--format {rollout.format} needs --policy openai: a server reports its calls")
        engine, renderer = await _hf_engine(policy.model, rollout, plan.seed, stack)
    elif policy.name == "openai":
        tokenizer_here = bool(policy.model) and await anyio.Path(policy.model).is_dir()
        renderer = await _renderer_for_server(policy.model if tokenizer_here else "", rollout)
        if not tokenizer_here:
            rollout = dataclasses.replace(rollout, max_context=rollout.max_context * BYTES_PER_TOKEN)
        flavour: Literal["chat", "auto"] = "auto" if tokenizer_here and not native else "chat"
        engine = await stack.enter_async_context(
            OpenAIEngine(policy.url, policy.model, flavour=flavour, retry_for=UNREACHABLE_SECONDS)
        )
    else:
        rollout = with_scripts(rollout)
        renderer = Renderer(ByteTokenizer(), make_format(rollout))
        engine = ScriptedEngine(renderer, await _scripts(plan, provider, renderer))
    return make_pipeline(engine, renderer, provider, plan.tasks, plan.env, rollout, meter=meter)


async def _scripts(plan: EvalPlan, provider: SandboxProvider, renderer: Renderer) -> Mapping[str, Script]:
    match plan.policy.name:
        case "gold":
            return {task.task_id: await gold_script(task, provider, renderer.format) for task in plan.tasks}
        case "empty":
            return {task.task_id: empty_script(renderer.format) for task in plan.tasks}
        case _:
            assert plan.policy.script is not None
            return read_scripts(plan.policy.script, plan.tasks, renderer.format)


async def _hf_engine(path: str, rollout: RolloutConfig, seed: int, stack: AsyncExitStack) -> tuple[Engine, Renderer]:
    from sky_trainer.engines import HFEngine
    from sky_trainer.models import load_model, load_tokenizer, on_best_device

    tokenizer = await anyio.to_thread.run_sync(load_tokenizer, path)
    model = await anyio.to_thread.run_sync(load_model, path)
    model = await anyio.to_thread.run_sync(on_best_device, model)
    renderer = make_renderer(tokenizer, rollout)
    engine = HFEngine(model, renderer.decode, renderer.stop_token_ids, seed=seed)
    return await stack.enter_async_context(engine), renderer


async def _renderer_for_server(model: str, rollout: RolloutConfig) -> Renderer:
    """The tokenizer in the model's directory, else bytes: then the server gets text, whatever ids it could take."""
    if model:
        from sky_trainer.models import load_tokenizer

        return make_renderer(await anyio.to_thread.run_sync(load_tokenizer, model), rollout)
    if rollout.template_options:
        raise ConfigError("rollout.template_options: they need --model, a directory that holds the model's tokenizer")
    return make_renderer(ByteTokenizer(), rollout)
