"""What every adapter needs first: a pipeline from plain settings, and for blocking libraries a thread to run it on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import skyenv
from skyenv import formats
from skyenv.core import Engine, SandboxProvider
from skyenv.envs.swe.loading import TaskSet, load_tasks
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError
from skyenv.portal import Portal
from skyenv.renderer import Renderer, Tokenizer
from skyenv.rollout import TurnRules
from skyenv.samples import RowRules
from skyenv.types import Limits, SamplingParams, StopReason, TrajectoryGroup
from skyenv.vector.pipeline import RolloutPipeline, StageWidths
from skyenv.vector.stopping import StopAction


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """How rollouts are made. `tasks` is what `load_tasks` takes, `env_options` what the environment's id takes.

    `sandbox`: the URL of a node server or gateway, None for one in this process. `format` is a tool-call format of
    `skyenv.formats` that suits the model.
    """

    tasks: TaskSet = "builtin"
    env: str = "SkyRL/SWE-v0"
    env_options: Mapping[str, Any] = field(default_factory=dict)
    sandbox: str | None = None
    token: str | None = None
    format: str = "hermes"
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rules: TurnRules = field(default_factory=TurnRules)
    widths: StageWidths = field(default_factory=StageWidths)
    stop_policy: Mapping[StopReason, StopAction] = field(default_factory=dict)

    def load(self) -> list[SweTask]:
        """The tasks. ConfigError when they cannot be had."""
        return load_tasks(self.tasks)

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        """The renderer for a model's tokenizer. ConfigError when its chat template cannot be used exactly."""
        return Renderer(tokenizer, formats.get(self.format))

    def pipeline(
        self, engine: Engine, renderer: Renderer, provider: SandboxProvider, tasks: Sequence[SweTask]
    ) -> RolloutPipeline:
        """A pipeline whose environments share one provider."""
        return RolloutPipeline(
            engine=engine,
            make_env=lambda: skyenv.make(self.env, tasks=tasks, sandbox=provider, **self.env_options),
            renderer=renderer,
            limits=self.limits,
            sampling=self.sampling,
            rules=self.rules,
            widths=self.widths,
            stop_policy=self.stop_policy,
        )

    @asynccontextmanager
    async def open(self, engine: Engine, renderer: Renderer) -> AsyncIterator[RolloutPipeline]:
        """A pipeline with a provider of its own, which ends with the block. The engine belongs to the caller."""
        tasks = self.load()
        async with skyenv.connect(self.sandbox, self.token) as provider:
            yield self.pipeline(engine, renderer, provider, tasks)


def row_rules(tokenizer: Any, rows: Literal["trajectory", "last", "segment"]) -> RowRules:
    """How rows are made for a model's tokenizer. ConfigError when it has no end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("tokenizer: it has no eos token, which a row that may not train consists of")
    return RowRules(tokenizer.eos_token_id, len(tokenizer), rows)


class BlockingRollouts:
    """`Rollouts` for one calling thread: a context manager that owns a thread with everything asynchronous on it.

    An engine that is an asynchronous context manager is entered there; others stay their owner's.
    """

    def __init__(self, rollouts: Rollouts, engine: Engine, tokenizer: Tokenizer) -> None:
        self.rollouts = rollouts
        self.renderer = rollouts.renderer(tokenizer)
        self.tasks = {task.task_id: task for task in rollouts.load()}
        self._engine = engine
        self._stack = ExitStack()
        self._portal: Portal | None = None
        self._pipeline: RolloutPipeline | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(Portal())
            if isinstance(self._engine, AbstractAsyncContextManager):
                stack.enter_context(portal.enter(self._engine))
            opening = self.rollouts.open(self._engine, self.renderer)
            self._pipeline = stack.enter_context(portal.enter(opening))
            self._portal, self._stack = portal, stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipeline = self._portal = None
        self._stack.close()

    def collect(self, task_ids: Sequence[str], group_size: int) -> list[TrajectoryGroup]:
        """Whole groups in the order of the tasks; an interrupt cancels them. ConfigError for an unknown id."""
        if self._pipeline is None or self._portal is None:
            raise ConfigError("the rollouts are not open; use them inside `with`")
        unknown = [task_id for task_id in task_ids if task_id not in self.tasks]
        if unknown:
            raise ConfigError(f"task {unknown[0]!r} is none of the {len(self.tasks)} of {self.rollouts.tasks}")
        pipeline, tasks = self._pipeline, [self.tasks[task_id] for task_id in task_ids]
        actor = self._portal.actor()
        try:
            return actor.call(lambda: pipeline.collect(tasks, group_size))
        finally:
            actor.close()
