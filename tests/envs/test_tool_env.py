"""The base class, through an environment as small as an author would write it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from skyenv.core import Sandbox
from skyenv.envs.tool_env import ToolEnv
from skyenv.errors import ConfigError, EnvError, ResetNeeded
from skyenv.testing.env import check_env
from skyenv.tools import Finish
from skyenv.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True)
class Sum:
    task_id: str
    numbers: tuple[int, ...]


class Say:
    """A tool without a sandbox; keeps what it was told."""

    spec = ToolSpec(
        "say",
        "Say the sum.",
        {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    )

    def __init__(self, said: list[int]) -> None:
        self._said = said

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        if arguments["number"] == 666:
            raise RuntimeError("bug")
        if arguments["number"] == 667:
            await sandbox.exec("true")
        self._said.append(arguments["number"])
        return "noted" * (arguments["number"] if arguments["number"] > 100 else 1)


class SumEnv(ToolEnv[Sum]):
    """Adds numbers."""

    def __init__(self, **options: Any) -> None:
        self.said: list[int] = []
        self.open = 0
        tasks = [Sum(f"sum-{n}", tuple(range(n))) for n in range(2, 12)]
        super().__init__(tasks, lambda: (Say(self.said), Finish()), **options)

    async def begin(self, task: Sum, resources: AsyncExitStack) -> None:
        self.said.clear()
        await resources.enter_async_context(self._counted())

    def instructions(self, task: Sum) -> tuple[Message, ...]:
        return (Message("user", f"Add {task.numbers}"),)

    async def grade(self, task: Sum, sandbox: Sandbox | None) -> tuple[float, dict[str, Any]]:
        right = self.said[-1:] == [sum(task.numbers)]
        return float(right), {"right": right}

    @asynccontextmanager
    async def _counted(self) -> Any:
        self.open += 1
        yield
        self.open -= 1


def say(number: Any) -> ToolCall:
    return ToolCall("say", {"number": number})


async def test_conforms() -> None:
    await check_env(SumEnv, action=say(1))


class NoPromptCheck(SumEnv):
    @property
    def prompt(self) -> tuple[Message, ...]:
        return (Message("user", "always"),)


class AnotherTaskEachTime(SumEnv):
    def seed_episode(self, seed: int | None) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        super().seed_episode(self.calls)


class AnyTask(SumEnv):
    def _choose(self, options: Mapping[str, Any]) -> Sum:
        return self._tasks[0]


class SameNames(SumEnv):
    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return (Say.spec, Say.spec)


class RaisesOnMistakes(SumEnv):
    async def astep(self, action: Any) -> Any:
        if self._episode is not None and action == {}:
            raise KeyError("name")
        return await super().astep(action)


class EndsOnMistakes(SumEnv):
    async def astep(self, action: Any) -> Any:
        step = await super().astep(action)
        return step._replace(terminated=True) if step.info["failed"] else step


class RewardOfText(SumEnv):
    async def grade(self, task: Sum, sandbox: Sandbox | None) -> Any:
        return "1.0", {}


class VerdictOfObjects(SumEnv):
    async def grade(self, task: Sum, sandbox: Sandbox | None) -> Any:
        return 1.0, {"task": task}


class GoesOnAfterwards(SumEnv):
    async def aevaluate(self) -> Any:
        graded = await super().aevaluate()
        self._current().over = False
        return graded


class ClosesOnce(SumEnv):
    async def aclose(self) -> None:
        if self._episode is None:
            raise RuntimeError("closed already")
        await super().aclose()


class GradesBeforeReset(SumEnv):
    async def aevaluate(self) -> Any:
        return (0.0, {}) if self._episode is None else await super().aevaluate()


class NoTaskId(SumEnv):
    async def areset(self, **options: Any) -> Any:
        return (await super().areset(**options))[0], {}


class NothingToSay(SumEnv):
    def instructions(self, task: Sum) -> tuple[Message, ...]:
        return ()


class Speechless(SumEnv):
    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return (ToolSpec("say", "", Say.spec.parameters),)


class LooseParameters(SumEnv):
    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return (ToolSpec("say", "Say.", {"number": "integer"}),)


class PlainTuples(SumEnv):
    async def astep(self, action: Any) -> Any:
        return tuple(await super().astep(action))


class BytesForText(SumEnv):
    async def astep(self, action: Any) -> Any:
        return (await super().astep(action))._replace(observation=b"")


class WholeRewards(SumEnv):
    async def astep(self, action: Any) -> Any:
        return (await super().astep(action))._replace(reward=1)


class RewardOfNothing(SumEnv):
    async def astep(self, action: Any) -> Any:
        return (await super().astep(action))._replace(reward=float("nan"))


class FlagsOfNumbers(SumEnv):
    async def astep(self, action: Any) -> Any:
        return (await super().astep(action))._replace(truncated=0)


class Silent(SumEnv):
    async def astep(self, action: Any) -> Any:
        step = await super().astep(action)
        return step._replace(observation="") if step.info["failed"] else step


class EndsAtOnce(SumEnv):
    async def astep(self, action: Any) -> Any:
        step = await super().astep(action)
        return step if step.info["failed"] else step._replace(terminated=True)


class AnotherGradeEachTime(SumEnv):
    async def aevaluate(self) -> Any:
        self.grades = getattr(self, "grades", 0) + 1
        return float(self.grades), (await super().aevaluate())[1]


class EndlessReward(SumEnv):
    async def grade(self, task: Sum, sandbox: Sandbox | None) -> Any:
        return float("inf"), {}


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (GradesBeforeReset, "before reset: .*aevaluate before areset"),
        (NoTaskId, r"reset: .*info\['task_id'\]"),
        (NothingToSay, "reset: "),
        (Speechless, "tools: .*say what it does"),
        (LooseParameters, "tools: .*schema of type object"),
        (PlainTuples, "action: .*must return a Step"),
        (BytesForText, "action: .*observation must be text"),
        (WholeRewards, "action: .*must be a float"),
        (RewardOfNothing, "action: .*must be finite"),
        (FlagsOfNumbers, "action: .*flags must be bools"),
        (Silent, "mistakes: .*must be answered"),
        (EndsAtOnce, "action: .*must not end the episode"),
        (AnotherGradeEachTime, "evaluation: .*idempotent"),
        (EndlessReward, "evaluation: .*finite or None"),
        (NoPromptCheck, "before reset: .*prompt before areset"),
        (AnotherTaskEachTime, "reset: .*equal seeds"),
        (AnyTask, "reset: .*unknown task id"),
        (SameNames, "tools: .*unique"),
        (RaisesOnMistakes, "mistakes: .*KeyError"),
        (EndsOnMistakes, "mistakes: .*must not end"),
        (RewardOfText, "evaluation: .*finite or None"),
        (VerdictOfObjects, "evaluation: .*not JSON serializable"),
        (GoesOnAfterwards, "evaluation: .*astep after aevaluate"),
        (ClosesOnce, "closing: .*closed already"),
    ],
)
async def test_each_broken_rule_is_named(broken: type[SumEnv], rule: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await check_env(broken, action=say(1))
    assert any(re.match(rule, str(error)) for error in caught.value.exceptions), caught.value.exceptions


async def test_an_episode() -> None:
    async with SumEnv() as env:
        observation, info = await env.areset(options={"task": "sum-4"})
        assert (observation, info) == ("Add (0, 1, 2, 3)", {"task_id": "sum-4"})
        step = await env.astep({"name": "say", "arguments": {"number": "6"}})
        assert step == ("noted", 0.0, False, False, {"task_id": "sum-4", "turn": 1, "failed": False})
        step = await env.astep(ToolCall("finish", {}))
        assert (step.terminated, step.truncated, step.info["stop_reason"]) == (True, False, "finish")
        with pytest.raises(ResetNeeded):
            await env.astep(say(6))
        assert await env.aevaluate() == (1.0, {"right": True})


async def test_mistakes_cost_turns_and_the_last_one_truncates() -> None:
    async with SumEnv(max_turns=3) as env:
        await env.areset(seed=0)
        for action, told in (
            (ToolCall("shout", {}), "There is no tool 'shout'. The tools are: say, finish."),
            (say("many"), "Parameter 'number' of tool 'say' must be an integer"),
            ({"error": "no call"}, "no call"),
        ):
            step = await env.astep(action)
            assert step.observation.startswith(told)
            assert step.info["failed"]
        assert (step.terminated, step.truncated, step.info["stop_reason"]) == (False, True, "max_turns")


@pytest.mark.parametrize(
    "action", [None, 5, "say", [], {"name": 5}, {"name": "say", "arguments": None}, {"name": ["say"]}]
)
async def test_nonsense_is_answered(action: Any) -> None:
    async with SumEnv() as env:
        await env.areset(seed=0)
        step = await env.astep(action)
        assert step.info["failed"]
        assert step.observation


async def test_finish_in_the_last_turn_is_a_finish() -> None:
    async with SumEnv(max_turns=1) as env:
        await env.areset(seed=0)
        step = await env.astep(ToolCall("finish", {}))
        assert (step.terminated, step.truncated) == (True, False)


async def test_resources_live_as_long_as_the_episode() -> None:
    async with SumEnv() as env:
        await env.areset(seed=0)
        await env.areset(seed=1)
        assert env.open == 1
    assert env.open == 0
    await env.aclose()


async def test_long_observations_are_cut() -> None:
    async with SumEnv(observation_max_chars=500) as env:
        await env.areset(seed=0)
        step = await env.astep(say(10_000))
        assert len(step.observation) < 2_000
        assert step.observation.startswith("noted")
        assert step.observation.endswith("noted")


@pytest.mark.parametrize("number", [666, 667])
async def test_a_bug_of_a_tool_raises(number: int) -> None:
    async with SumEnv() as env:
        await env.areset(seed=0)
        with pytest.raises(EnvError):
            await env.astep(say(number))


async def test_seeds_choose_the_task() -> None:
    async with SumEnv() as env:
        chosen = [(await env.areset(seed=seed))[1]["task_id"] for seed in (1, 2, 3, 4, 1, 2, 3, 4)]
        assert chosen[:4] == chosen[4:]
        assert len(set(chosen)) > 1
        await env.areset(seed=1)
        going_on = [(await env.areset())[1]["task_id"] for _ in range(12)]
        assert len(set(going_on)) > 3
        own = Sum("own", (1, 1))
        assert (await env.areset(options={"task": own}))[1] == {"task_id": "own"}


@pytest.mark.parametrize(
    ("options", "named"),
    [({"task": "sum-22"}, "did you mean 'sum-2'"), ({"tsk": "sum-2"}, "'tsk'"), ({"task": 5}, "not int")],
)
async def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    async with SumEnv() as env:
        with pytest.raises(ConfigError, match=named):
            await env.areset(options=options)


@pytest.mark.parametrize(
    "options", [{"max_turns": 0}, {"observation_max_chars": 3}, {"render_mode": "human"}], ids=lambda o: next(iter(o))
)
def test_wrong_settings_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SumEnv(**options)
