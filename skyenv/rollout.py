"""One environment and one engine make one trajectory: the turn loop, its budgets and the rule against repetition.

Invariants: ids only ever grow at their end, and what stands under mask 1 is byte for byte what the engine returned; a
segment never outgrows `Limits.max_context` and ends with a sampled id (an observation that no generation follows stays
in its turn alone). Everything that the policy does wrong comes back to it as an observation; only infrastructure and
authors' bugs raise. The caller owns the environment and evaluates it, whatever reason ended the run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import anyio

from skyenv.core import Engine, Env
from skyenv.errors import ConfigError, EngineError, EnvError, SandboxError, boundary
from skyenv.formats import Parsed, get
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.stuck import STRICT, StuckDetector, StuckRule
from skyenv.types import (
    Completion,
    Limits,
    Message,
    SamplingParams,
    Segment,
    Step,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

FINISH = "finish"
CUT_OFF = "Your answer was cut off after {tokens} tokens and nothing was run. Use smaller steps."
NUDGE = "No tool call found. Continue the task with one tool call, or call finish when you are done."
FINISH_ALONE = "finish must be the only call of its turn. Nothing was run."
FIRST_ONLY = "[Only the first of {calls} calls was run. Make one call per turn.]"
TURNS_LEFT = "[{turns} turns left. Call finish before they run out.]"
STUCK_WARNING = "[You repeat yourself: {what}. Try something else.]"


def byte_renderer() -> Renderer:
    """The renderer for engines that take text: bytes as tokens, calls in the `codeact` format."""
    return Renderer(ByteTokenizer(), get("codeact"))


@dataclass(frozen=True, slots=True)
class TurnRules:
    """How turns are judged.

    `stuck` None switches that rule off; with `warn_stuck` the first hit is told to the policy and the second ends the
    run. `all_calls` runs every call of a turn in order instead of the first alone. From `remind_turns` turns left on,
    observations say how many remain (0: never).
    """

    stuck: StuckRule | None = STRICT
    warn_stuck: bool = False
    all_calls: bool = False
    remind_turns: int = 0


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """Budgets and rules of the turn loop; ConfigError for values that cannot work.

    The answer budget is the smaller of `sampling.max_tokens` and `limits.max_tokens_per_turn`.
    """

    limits: Limits = field(default_factory=Limits)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rules: TurnRules = field(default_factory=TurnRules)

    def __post_init__(self) -> None:
        limits = self.limits
        if self.answer_budget < 1:
            raise ConfigError(f"max_tokens: {self.answer_budget} leaves no room for an answer; at least 1")
        if self.answer_budget >= limits.max_context:
            raise ConfigError(
                f"limits.max_context: {limits.max_context} leaves no room for a prompt beside an answer of"
                f" {self.answer_budget} tokens; raise it or lower limits.max_tokens_per_turn"
            )
        if limits.max_turns < 1 or limits.max_nudges < 1:
            raise ConfigError("limits: max_turns and max_nudges must be at least 1")

    @property
    def answer_budget(self) -> int:
        """Tokens that one generation may take, reserved before each turn."""
        return min(self.sampling.max_tokens, self.limits.max_tokens_per_turn)


async def rollout(
    env: Env, engine: Engine, renderer: Renderer, trajectory: Trajectory, options: RolloutOptions
) -> StopReason:
    """Play one episode on an environment after `areset`; fills `trajectory` turn by turn and returns why it ended.

    What was played before an exception or a cancellation stays in the trajectory. Raises EngineError, SandboxError, or
    EnvError for a bug of the environment; never evaluates and never closes.
    """
    episode = _Episode(env, engine, renderer, trajectory, options)
    reason = StopReason.WALL_CLOCK
    with anyio.move_on_after(options.limits.wall_clock):
        reason = await episode.play()
    trajectory.stop_reason = reason
    return reason


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a turn's text led to: a text for each call (None: for no call), and how the episode stands."""

    results: tuple[tuple[str, ToolCall | None], ...]
    error: str | None = None
    failed: bool = False
    stop: StopReason | None = None

    @classmethod
    def refused(cls, error: str) -> _Answer:
        """Nothing was run, and why."""
        return cls(((error, None),), error=error, failed=True)

    @property
    def observation(self) -> str:
        """All texts, as a reader sees them."""
        return "\n".join(text for text, _ in self.results)

    def with_note(self, note: str) -> _Answer:
        """The same with a line at the end of the last text."""
        *before, (text, call) = self.results
        return replace(self, results=(*before, (f"{text}\n{note}", call)))


class _Episode:
    """State of one run of the loop."""

    def __init__(
        self, env: Env, engine: Engine, renderer: Renderer, trajectory: Trajectory, options: RolloutOptions
    ) -> None:
        self.env, self.engine, self.renderer = env, engine, renderer
        self.trajectory, self.options = trajectory, options
        self.detector = StuckDetector(options.rules.stuck) if options.rules.stuck else None
        self.warned = False
        self.turns_without_call = 0
        self.pending: list[int] = []  # the delta that the next generation will see
        self.cut_off = False
        with boundary(EnvError, "env.prompt"):
            trajectory.prompt = tuple(env.prompt)
        self.messages: list[Message] = list(renderer.conversation(trajectory.prompt, env.tools))
        trajectory.prompt_hash = renderer.prompt_hash(trajectory.prompt, env.tools)
        trajectory.segments.append(Segment())
        self.pending = list(renderer.prompt(trajectory.prompt, env.tools))

    async def play(self) -> StopReason:
        """Turns until something ends the episode."""
        while True:
            stop = self._exhausted() or await self._turn()
            if stop is not None:
                return stop

    @property
    def segment(self) -> Segment:
        return self.trajectory.segments[-1]

    def _count(self, name: str, amount: int = 1) -> None:
        self.trajectory.counters[name] = self.trajectory.counters.get(name, 0) + amount

    def _exhausted(self) -> StopReason | None:
        """The budget that forbids another turn: the whole answer must fit behind what is pending."""
        limits = self.options.limits
        if len(self.trajectory.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        needed = len(self.segment.token_ids) + len(self.pending) + self.options.answer_budget
        if needed > limits.max_context:
            return StopReason.MAX_TOKENS if self.cut_off else StopReason.CONTEXT
        return None

    async def _turn(self) -> StopReason | None:
        """Generate, run what was asked for, and prepare the observation."""
        deadline = anyio.current_time() + self.options.limits.turn_timeout
        started = anyio.current_time()
        completion = await self._generate(deadline)
        generated = anyio.current_time()
        text, ids = self._append(completion)
        parsed = self.renderer.format.parse(
            text,
            self.env.tools,
            finish_reason=completion.finish_reason,
            thinking_open=self.renderer.thinking_open,
        )
        turn = Turn(
            text, tuple(parsed.calls), "", completion.finish_reason, completion.policy_version, generated - started, 0.0
        )
        self.trajectory.turns.append(turn)
        answer = self._with_reminder(await self._answer(parsed, completion, deadline))
        self.trajectory.turns[-1] = replace(
            turn,
            observation=answer.observation,
            error=answer.error,
            step_seconds=anyio.current_time() - generated,
        )
        if answer.stop is None:
            self._observe(text, answer, ids)
        return answer.stop

    async def _generate(self, deadline: float) -> Completion:
        """One completion, checked against what was asked for."""
        sampling = self.options.sampling
        seed = sampling.seed
        if seed is not None:  # siblings and turns must differ, reruns must not
            trajectory = self.trajectory
            key = f"{seed} {trajectory.task_id} {trajectory.sample_index} {len(trajectory.turns)}"
            seed = zlib.crc32(key.encode()) >> 1
        wanted = replace(
            sampling,
            max_tokens=self.options.answer_budget,
            stop_token_ids=sampling.stop_token_ids or tuple(self.renderer.stop_token_ids),
            seed=seed,
        )
        ids, messages = (*self.segment.token_ids, *self.pending), tuple(self.messages)
        with anyio.CancelScope(deadline=deadline), boundary(EngineError, "engine"):
            completion = await self.engine.generate(ids, wanted, messages=messages, session_id=self._session_id)
            return _checked(completion, wanted.max_tokens)
        raise EngineError(f"no completion within {self.options.limits.turn_timeout:g} s")

    @property
    def _session_id(self) -> str:
        trajectory = self.trajectory
        return f"{trajectory.task_id}#{trajectory.group_id}.{trajectory.sample_index}.{trajectory.attempts}"

    def _append(self, completion: Completion) -> tuple[str, Sequence[int]]:
        """Put what the engine saw and what it answered into the segment; returns the answer's text and ids.

        Text without ids is tokenised here: mask 0, and the trajectory is no longer exact.
        """
        self.segment.append_context(self.pending)
        self.pending = []
        if completion.token_ids:
            self.segment.append_sampled(completion.token_ids, completion.logprobs)
            return self.renderer.decode(completion.token_ids), completion.token_ids
        ids = self.renderer.encode(completion.text) if completion.text else []
        self.segment.append_context(ids)
        self.trajectory.exact = self.trajectory.exact and not ids
        self._count("text_tokens", len(ids))
        return completion.text, ids

    async def _answer(self, parsed: Parsed, completion: Completion, deadline: float) -> _Answer:
        """Run the calls of a turn, or say what is wrong with it."""
        self.cut_off = completion.finish_reason == "length" and not parsed.calls
        if self.cut_off:
            self._count("cut_off")
            text = parsed.error or CUT_OFF.format(tokens=self.options.answer_budget)
            return _Answer.refused(text)
        calls, error = list(parsed.calls), parsed.error
        if not calls and error is None:
            return self._nudge()
        self.turns_without_call = 0
        if error is None and len(calls) > 1 and any(call.name == FINISH for call in calls):
            error = FINISH_ALONE
        if error is not None:
            self._count("parse_errors")
            return self._judge(_Answer.refused(error), ToolCall("", {"error": error}))
        if self.options.rules.all_calls:
            return await self._run_all(calls, deadline)
        answer = await self._run(calls[0], deadline)
        if len(calls) > 1 and answer.stop is None:
            self._count("dropped_calls", len(calls) - 1)
            return answer.with_note(FIRST_ONLY.format(calls=len(calls)))
        return answer

    def _nudge(self) -> _Answer:
        """Ask for a call; the `max_nudges`-th turn in a row without one ends the run."""
        self.turns_without_call += 1
        if self.turns_without_call >= self.options.limits.max_nudges:
            return _Answer((), stop=StopReason.NO_TOOL_CALL)
        self._count("nudges")
        return _Answer(((NUDGE, None),))

    async def _run_all(self, calls: Sequence[ToolCall], deadline: float) -> _Answer:
        """Every call in order until one ends the episode."""
        answers: list[_Answer] = []
        for call in calls:
            answers.append(await self._run(call, deadline))
            if answers[-1].stop is not None:
                break
        return replace(answers[-1], results=tuple(result for answer in answers for result in answer.results))

    async def _run(self, call: ToolCall, deadline: float) -> _Answer:
        """One call on the environment, and whether the policy repeats itself."""
        step = await self._step(call, deadline)
        self._count("tool_calls")
        failed = bool(step.info.get("failed"))
        answer = _Answer(((step.observation, call),), failed=failed, stop=_env_stop(step))
        return self._judge(answer, call)

    async def _step(self, call: ToolCall, deadline: float) -> Step:
        with anyio.CancelScope(deadline=deadline), boundary(EnvError, f"env.astep({call.name})"):
            return await self.env.astep(call)
        raise SandboxError(f"{call.name} did not return within {self.options.limits.turn_timeout:g} s")

    def _judge(self, answer: _Answer, call: ToolCall) -> _Answer:
        """Warn or end when the stuck rule is met."""
        if answer.stop is not None or self.detector is None:
            return answer
        what = self.detector.add(call, answer.observation, failed=answer.failed)
        if what is None:
            return answer
        if self.options.rules.warn_stuck and not self.warned:
            self.warned = True
            self._count("stuck_warnings")
            self.detector.clear()
            return answer.with_note(STUCK_WARNING.format(what=what))
        return replace(answer, stop=StopReason.STUCK)

    def _with_reminder(self, answer: _Answer) -> _Answer:
        """Add what the policy must know of its budget."""
        left = self.options.limits.max_turns - len(self.trajectory.turns)
        if answer.stop is not None or not 0 < left <= self.options.rules.remind_turns:
            return answer
        return answer.with_note(TURNS_LEFT.format(turns=left))

    def _observe(self, text: str, answer: _Answer, ids: Sequence[int]) -> None:
        """Make the observation the next generation's context."""
        self.pending = list(self.renderer.observations(answer.results, completion_ids=ids))
        self._count("observation_tokens", len(self.pending))
        self.messages.append(Message("assistant", text))
        self.messages += [self.renderer.format.observation(*result) for result in answer.results]


def _env_stop(step: Step) -> StopReason | None:
    """Why the environment ended its episode, None while it goes on. It may name the reason in `info`."""
    if not (step.terminated or step.truncated):
        return None
    named = step.info.get("stop_reason")
    if named is not None:
        with boundary(EnvError, "info['stop_reason']"):
            return StopReason(named)
    return StopReason.FINISH if step.terminated else StopReason.MAX_TURNS


def _checked(completion: Completion, max_tokens: int) -> Completion:
    """The completion; EngineError when it is not what an engine may answer."""
    if completion.finish_reason == "abort":
        raise EngineError("the engine aborted the generation")
    if len(completion.token_ids) > max_tokens:
        raise EngineError(f"the engine answered {len(completion.token_ids)} tokens for max_tokens {max_tokens}")
    if not all(math.isfinite(value) and value <= 1e-4 for value in completion.logprobs):
        raise EngineError("the engine answered a logprob that is no log probability")
    return completion
