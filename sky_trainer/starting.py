"""The policy that GRPO starts from: a given model, or one that this run warms up on scripted experts.

What was warmed up is kept in the run directory, so that a resumed run starts from the same weights, which are also the
reference of a KL penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyio.from_thread import BlockingPortal

import skyenv
from sky_trainer.assembly import make_format, make_pipeline, make_renderer, with_scripts
from sky_trainer.config import Config
from sky_trainer.display import Display
from sky_trainer.lessons import replayed
from sky_trainer.models import load_model, load_tokenizer
from sky_trainer.policies import corpus, expert_scripts
from sky_trainer.rollouts import Rollouts
from sky_trainer.tiny import make_model, make_tokenizer
from sky_trainer.warm_start import supervise
from skyenv.core import SandboxProvider
from skyenv.engines.scripted import ScriptedEngine
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError, SkyEnvError
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.samples import describe
from skyenv.types import ToolSpec, Trajectory

WARM, DONE = "warm_start", ".complete"


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """The open provider and the portal on whose loop it lives."""

    portal: BlockingPortal
    provider: SandboxProvider


def starting_policy(config: Config, tasks: list[SweTask], sandboxes: Sandboxes, display: Display) -> tuple[Any, Any]:
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
    display.stage(f"loading {policy_source(config)}")
    return settled_policy(config)


def settled_policy(config: Config) -> tuple[Any, Any]:
    """The same, once it is there: for the processes that did not make it."""
    return load_model(policy_source(config), config.model.dtype), load_tokenizer(policy_source(config))


def policy_source(config: Config) -> str:
    """Directory or hub name of the policy that GRPO starts from, once `starting_policy` has returned."""
    return str(config.run_dir / WARM) if config.warm_start.steps else config.model.path


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
    """Play the right edit and every decoy of each task in real sandboxes; each trajectory with its share of demos.

    SkyEnvError when infrastructure spoils one.
    """
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
            (trajectory,) = group.trajectories
            if trajectory.failure is not None:
                raise SkyEnvError(f"warm start: {describe(trajectory)} failed: {trajectory.failure.message}")
            decoys = len(scripts[group.task_id]) - 1
            found.append((trajectory, right if number == 0 else (1 - right) / decoys))
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
    replays = [replayed(trajectory, tools, renderer) for trajectory, _ in experts]
    loss = supervise(
        model,
        [segment for played in replays for segment in played],
        [weight for played, (_, weight) in zip(replays, experts, strict=True) for _ in played],
        settings,
        pad_id=tokenizer.pad_token_id,
        seed=config.seed,
        on_step=lambda step, loss: display.progress(f"warm start {step}/{settings.steps}, loss {loss:.3f}"),
    )
    display.stage(f"warm start: loss {loss:.3f}")
