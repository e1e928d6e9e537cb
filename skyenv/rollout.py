"""One environment and one engine make one trajectory: the turn loop, its budgets and the rule against repetition.

Invariants: ids only ever grow at their end, and what stands under mask 1 is byte for byte what the engine returned; a
segment never outgrows `Limits.max_context` and ends with a sampled id (an observation that no generation follows stays
in its turn alone). History is condensed, where a condenser is given, before it would overflow. Everything that the
policy does wrong comes back to it as an observation; only infrastructure and authors' bugs raise. The caller owns the
environment and evaluates it, whatever reason ended the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import anyio

from skyenv.context import Context
from skyenv.core import Engine, Env, SelfPlayed
from skyenv.errors import ConfigError, EngineError, EnvError, SandboxError, boundary
from skyenv.formats import NativeFormat, Parsed, get
from skyenv.history import Condenser, History, Room
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.sampling import Sampler
from skyenv.stuck import STRICT, StuckDetector, StuckRule
from skyenv.types import Completion, Limits, Message, SamplingParams, Step, StopReason, ToolCall, Trajectory, Turn

FINISH = "finish"
CUT_OFF = "Your answer was cut off after {tokens} tokens and nothing was run. Use smaller steps."
NUDGE = "No tool call found. Continue the task with one tool call, or call finish when you are done."
FINISH_ALONE = "finish must be the only call of its turn. Nothing was run."
FIRST_ONLY = "[Only the first of {calls} calls was run. Make one call per turn.]"
TURNS_LEFT = "[{turns} turns left. Call finish before they run out.]"
TOKENS_LEFT = "[About {tokens} tokens of context left. Finish before they run out.]"
SECONDS_LEFT = "[{seconds} seconds left. Finish before they run out.]"
STUCK_WARNING = "[You repeat yourself: {what}. Try something else.]"
LEAST_PROGRESS = 0.1


def byte_renderer() -> Renderer:
    """The renderer for engines that take text: bytes as tokens, calls in the `codeact` format."""
    return Renderer(ByteTokenizer(), get("codeact"))


@dataclass(frozen=True, slots=True)
class TurnRules:
    """How turns are judged.

    `stuck` None switches that rule off; with `warn_stuck` the first hit is told to the policy and the second ends the
    run. `all_calls` runs every call of a turn in order instead of the first alone. From `remind_turns` turns,
    `remind_tokens` tokens of context or `remind_seconds` of the agent's clock left on, observations say how many remain
    (0: never). Observations of a turn are cut to `observation_tokens`, head and tail kept (0: as long as they come).

    `condenser` shortens the history before it would overflow the context, and also from `condense_tokens` tokens or
    `condense_turns` turns in view on (0: no such threshold), to about half of what may stand behind the prompt. Where
    it saves less than a tenth it is not asked again at a threshold.
    """

    stuck: StuckRule | None = STRICT
    warn_stuck: bool = False
    all_calls: bool = False
    remind_turns: int = 0
    remind_tokens: int = 0
    remind_seconds: float = 0.0
    observation_tokens: int = 0
    condenser: Condenser | None = None
    condense_tokens: int = 0
    condense_turns: int = 0


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
        for name, seconds in asdict(limits).items():
            if (name == "wall_clock" or name.endswith("_timeout")) and not seconds >= 0:
                raise ConfigError(f"limits.{name}: {seconds:g} is no number of seconds; at least 0")
        rules = self.rules
        if rules.condenser is None and (rules.condense_tokens or rules.condense_turns):
            raise ConfigError("rules.condenser: a threshold is set but no condenser; see skyenv.history")
        if rules.condense_turns == 1 or min(rules.condense_turns, rules.condense_tokens, rules.observation_tokens) < 0:
            raise ConfigError("rules: condense_turns must be 0 or at least 2, and no number of tokens negative")

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
    reason = StopReason.WALL_CLOCK
    with anyio.move_on_after(options.limits.wall_clock), boundary(EnvError, "the episode"):
        if isinstance(env, SelfPlayed):
            reason = await env.aplay(engine, renderer, trajectory, options.limits, options.sampling)
        else:
            reason = await _Episode(env, engine, renderer, trajectory, options).play()
    trajectory.stop_reason = reason
    if reason is not StopReason.FINISH:
        trajectory.counters["no_finish"] = 1
    return reason


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a turn's text led to: a text for each call (None: for no call), and how the episode stands."""

    results: tuple[tuple[str, ToolCall | None], ...]
    error: str | None = None
    failed: bool = False
    stop: StopReason | None = None
    reward: float = 0.0

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
        self.started = anyio.current_time()
        self.warned = self.stalled = self.cut_off = False
        self.turns_without_call = 0
        with boundary(EnvError, "env.prompt"):
            trajectory.prompt = tuple(env.prompt)
        self.context = Context(renderer, trajectory, env.tools)
        self._count = self.context.count

    async def play(self) -> StopReason:
        """Turns until something ends the episode."""
        while True:
            stop = await self._exhausted() or await self._turn()
            if stop is not None:
                return stop

    async def _exhausted(self) -> StopReason | None:
        """The budget that forbids another turn: the whole answer must fit behind what is pending."""
        limits, rules = self.options.limits, self.options.rules
        if len(self.trajectory.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        usable = limits.max_context - self.options.answer_budget
        if rules.condenser is not None and (self.context.size > usable or self._over_threshold()):
            await self._condense(rules.condenser, usable)
        if self.context.size > usable:
            return StopReason.MAX_TOKENS if self.cut_off else StopReason.CONTEXT
        return None

    def _over_threshold(self) -> bool:
        rules, context = self.options.rules, self.context
        if self.stalled:
            return False
        turns = len(context.history.exchanges)
        return 0 < rules.condense_tokens <= context.size or 0 < rules.condense_turns <= turns

    async def _condense(self, condenser: Condenser, usable: int) -> None:
        """Rewrite the history when the condenser makes it shorter by a tenth at least."""
        history, before = self.context.history, self.context.size
        if not history.exchanges:
            return
        prompt = self.context.tokens(History(()))
        target = (prompt + min(usable, self.options.rules.condense_tokens or usable)) // 2
        with boundary(EnvError, "condenser"):
            shorter = await condenser.condense(history, Room(target, self.context.tokens, self._ask))
        if not shorter.exchanges:
            raise EnvError("condenser: it returned an empty history; the last exchange must stay")
        self.stalled = self.context.tokens(shorter) - prompt > (1 - LEAST_PROGRESS) * (before - prompt)
        if self.stalled:
            self._count("condensations_without_progress")
        else:
            self.context.rewrite(shorter)

    async def _ask(self, question: str, text: str) -> str:
        """The model's answer to a question about a text; "" when there is no room to ask."""
        room = self.options.limits.max_context - self.options.answer_budget
        room -= len(self.renderer.prompt([Message("user", f"{question}\n\n")], ())) + 64
        if room < 1:
            return ""
        messages = (Message("user", f"{question}\n\n{self.renderer.clip(text, room)}"),)
        ids = tuple(self.renderer.prompt(messages, ()))
        if len(ids) + self.options.answer_budget > self.options.limits.max_context:
            return ""
        completion = await self._generate(ids, messages, anyio.current_time() + self.options.limits.turn_timeout)
        self._count("summaries")
        sampled = completion.token_ids or self.renderer.encode(completion.text)
        return self.renderer.decode(self.renderer.without_thinking(list(sampled)))

    async def _turn(self) -> StopReason | None:
        """Generate, run what was asked for, and prepare the observation."""
        deadline = anyio.current_time() + self.options.limits.turn_timeout
        started = anyio.current_time()
        completion = await self._generate(self.context.ids, tuple(self.context.messages), deadline)
        generated = anyio.current_time()
        with boundary(EngineError, "what the engine answered cannot be decoded"):
            text, ids = self.context.append(completion)
        parsed = self._parse(text, completion)
        turn = Turn(
            text,
            tuple(parsed.calls),
            "",
            completion.finish_reason,
            completion.policy_version,
            generated - started,
            step_seconds=0.0,
            versions=completion.versions,
        )
        self.trajectory.turns.append(turn)
        answer = self._with_reminder(self._clipped(await self._answer(parsed, completion, deadline)), ids)
        self.trajectory.turns[-1] = replace(
            turn,
            observation=answer.observation,
            error=answer.error,
            step_seconds=anyio.current_time() - generated,
            reward=answer.reward,
        )
        if answer.stop is None:
            self.context.observe(text, ids, answer.results, completion)
        return answer.stop

    def _parse(self, text: str, completion: Completion) -> Parsed:
        """The calls of an answer, from what the server reported beside the text or from the text."""
        format, reason = self.renderer.format, completion.finish_reason
        if completion.calls and isinstance(format, NativeFormat):
            return format.parse_native(text, completion.calls, self.env.tools, finish_reason=reason)
        opened = self.renderer.thinking_open
        return format.parse(text, self.env.tools, finish_reason=reason, thinking_open=opened)

    async def _generate(self, ids: tuple[int, ...], messages: tuple[Message, ...], deadline: float) -> Completion:
        """The turn's completion."""
        limits = self.options.limits
        sampler = Sampler(self.engine, self.renderer, self.trajectory, self.options.sampling, limits.turn_timeout)
        turn = len(self.trajectory.turns)
        return await sampler.sample(ids, messages, turn=turn, max_tokens=self.options.answer_budget, deadline=deadline)

    async def _answer(self, parsed: Parsed, completion: Completion, deadline: float) -> _Answer:
        """Run the calls of a turn, or say what is wrong with it."""
        self.cut_off = completion.finish_reason == "length" and not parsed.calls
        if self.cut_off:
            self._count("cut_off")
            return _Answer.refused(parsed.error or CUT_OFF.format(tokens=self.options.answer_budget))
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
        results = tuple(result for answer in answers for result in answer.results)
        return replace(answers[-1], results=results, reward=sum(answer.reward for answer in answers))

    async def _run(self, call: ToolCall, deadline: float) -> _Answer:
        """One call on the environment, and whether the policy repeats itself."""
        step = await self._step(call, deadline)
        self._count("tool_calls")
        failed = bool(step.info.get("failed"))
        answer = _Answer(((step.observation, call),), failed=failed, stop=_env_stop(step), reward=float(step.reward))
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

    def _clipped(self, answer: _Answer) -> _Answer:
        """The results within their budget of tokens, which they share."""
        budget = self.options.rules.observation_tokens
        if not budget or not answer.results:
            return answer
        share = max(1, budget // len(answer.results))
        results = tuple((self.renderer.clip(text, share), call) for text, call in answer.results)
        self._count("clipped_observations", sum(a != b for a, b in zip(results, answer.results, strict=True)))
        return replace(answer, results=results)

    def _with_reminder(self, answer: _Answer, ids: Sequence[int]) -> _Answer:
        """Add what the policy must know of its budgets."""
        limits, rules = self.options.limits, self.options.rules
        if answer.stop is not None:
            return answer
        turns = limits.max_turns - len(self.trajectory.turns)
        if 0 < turns <= rules.remind_turns:
            answer = answer.with_note(TURNS_LEFT.format(turns=turns))
        if rules.remind_tokens:
            delta = self.renderer.observations(answer.results, completion_ids=ids)
            tokens = limits.max_context - self.context.size - len(delta)
            if 0 < tokens <= rules.remind_tokens:
                answer = answer.with_note(TOKENS_LEFT.format(tokens=tokens))
        seconds = limits.wall_clock - (anyio.current_time() - self.started)
        if 0 < seconds <= rules.remind_seconds:
            answer = answer.with_note(SECONDS_LEFT.format(seconds=round(seconds)))
        return answer


def _env_stop(step: Step) -> StopReason | None:
    """Why the environment ended its episode, None while it goes on. It may name the reason in `info`."""
    if not (step.terminated or step.truncated):
        return None
    named = step.info.get("stop_reason")
    if named is not None:
        with boundary(EnvError, "info['stop_reason']"):
            return StopReason(named)
    return StopReason.FINISH if step.terminated else StopReason.MAX_TURNS
