"""What every environment must do, as small named checks through the public interface.

`check_env` runs them all; each makes an environment of its own, so they are independent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import anyio

from skyenv.core import Env, MakeEnv
from skyenv.errors import ConfigError, EnvError, ResetNeeded, SkyEnvError, boundary
from skyenv.types import Message, Step, ToolCall, ToolSpec

CHECK_TIMEOUT = 120.0


async def check_env(make_env: MakeEnv, *, action: ToolCall | Mapping[str, Any] | None = None) -> None:
    """Run every check. ExceptionGroup of AssertionErrors naming what failed.

    `action` is a valid call that does not end an episode; without it only refused calls are tried. Everything is
    opened and closed in the calling task.
    """
    checks = [_before_reset, _reset, _tools, _mistakes, _evaluation, _closing]
    named: list[tuple[str, Callable[[Env], Awaitable[None]]]] = [(check.__name__, check) for check in checks]
    if action is not None:
        named.append(("_action", partial(_action, action=action)))
    failures: list[AssertionError] = []
    for name, check in named:
        try:
            with anyio.fail_after(CHECK_TIMEOUT):
                await _guarded(make_env, check)
        except (AssertionError, SkyEnvError, TimeoutError) as error:
            failure = AssertionError(f"{name.strip('_').replace('_', ' ')}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            failures.append(failure)
    if failures:
        raise ExceptionGroup("the environment does not keep the contract of environments", failures)


async def _guarded(make_env: MakeEnv, check: Callable[[Env], Awaitable[None]]) -> None:
    """Run a check on a fresh environment; what an environment raises of its own is its author's bug, and a finding."""
    broken: AssertionError | None = None
    with boundary(EnvError, "the environment raised"):
        try:
            async with make_env() as env:
                await check(env)
        except AssertionError as error:
            broken = error
    if broken is not None:
        raise broken


async def _action(env: Env, action: ToolCall | Mapping[str, Any]) -> None:
    await env.areset(seed=7)
    step = _checked_step(await env.astep(action), "a valid action")
    assert not step.terminated, "the given action must not end the episode"


async def _closing(env: Env) -> None:
    await env.areset(seed=1)
    await env.aclose()
    await env.aclose()


async def _before_reset(env: Env) -> None:
    await _needs_reset(lambda: env.astep(ToolCall("", {})), "astep before areset")
    await _needs_reset(env.aevaluate, "aevaluate before areset")
    try:
        prompt = env.prompt
    except ResetNeeded:
        return
    raise AssertionError(f"prompt before areset must raise ResetNeeded, not return {prompt!r}")


async def _needs_reset(call: Callable[[], Awaitable[Any]], what: str) -> None:
    try:
        answer = await call()
    except ResetNeeded:
        return
    raise AssertionError(f"{what} must raise ResetNeeded, not return {answer!r}")


async def _reset(env: Env) -> None:
    """Equal seeds choose equal tasks and tell the same; an unknown task is the user's mistake."""
    found = []
    for _ in range(2):
        observation, info = await env.areset(seed=7)
        assert isinstance(observation, str), f"the observation must be text, not {type(observation).__name__}"
        assert isinstance(info.get("task_id"), str), "info['task_id'] must name the task"
        found.append((info["task_id"], observation, tuple(env.prompt)))
    assert found[0] == found[1], "areset with equal seeds must give equal tasks, observations and prompts"
    prompt = env.prompt
    assert prompt, "prompt must hold a message"
    assert all(isinstance(message, Message) for message in prompt), "prompt must hold messages only"
    try:
        await env.areset(options={"task": "no such task, surely"})
    except ConfigError:
        pass
    else:
        raise AssertionError("areset with an unknown task id must raise ConfigError")
    _, info = await env.areset(options={"task": found[0][0]})
    assert info["task_id"] == found[0][0], "options={'task': id} must choose that task"


async def _tools(env: Env) -> None:
    assert env.tools, "an environment must have a tool"
    assert all(isinstance(spec, ToolSpec) for spec in env.tools), "tools must be ToolSpecs"
    names = [spec.name for spec in env.tools]
    assert len(set(names)) == len(names), f"tool names must be unique: {names}"
    for spec in env.tools:
        assert spec.parameters.get("type") == "object", f"{spec.name}: parameters must be a schema of type object"
        assert spec.description, f"{spec.name}: a tool must say what it does"


async def _mistakes(env: Env) -> None:
    """What a model does wrong is an observation, and the episode goes on."""
    await env.areset(seed=7)
    mistakes: list[Any] = [
        ToolCall("no_such_tool", {}),
        {"name": "no_such_tool", "arguments": {}},
        {"error": "nothing to run"},
        {},
        ToolCall(env.tools[0].name, {"no_such_argument": "\0"}),
    ]
    for mistake in mistakes:
        step = _checked_step(await env.astep(mistake), f"the mistake {mistake!r}")
        assert step.observation, f"the mistake {mistake!r} must be answered"
        assert not step.terminated, f"the mistake {mistake!r} must not end the episode"
        if step.truncated:
            await env.areset(seed=7)


def _checked_step(step: Any, what: str) -> Step:
    assert isinstance(step, Step), f"{what}: astep must return a Step"
    assert isinstance(step.observation, str), f"{what}: the observation must be text"
    assert isinstance(step.reward, float), f"{what}: the reward must be a float"
    assert math.isfinite(step.reward), f"{what}: the reward must be finite"
    assert {type(step.terminated), type(step.truncated)} == {bool}, f"{what}: the flags must be bools"
    assert isinstance(step.info, dict), f"{what}: info must be a dict"
    return step


async def _evaluation(env: Env) -> None:
    await env.areset(seed=7)
    reward, verdict = await env.aevaluate()
    assert reward is None or (isinstance(reward, float) and math.isfinite(reward)), "the reward must be finite or None"
    json.dumps(verdict)
    assert await env.aevaluate() == (reward, verdict), "aevaluate must be idempotent"
    await _needs_reset(lambda: env.astep({"error": "late"}), "astep after aevaluate")
