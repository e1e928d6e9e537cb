"""A Gymnasium vector environment over asynchronous environments: N episodes step at the same time on one loop.

Autoreset modes: NEXT_STEP (Gymnasium's default: the step after an episode's end starts the next one and ignores the
action), SAME_STEP (the step that ends an episode starts the next one too: its observation is the new episode's, and
infos have `final_obs` and `final_info` of the old one) and DISABLED (an ended episode is left alone, with its last
observation and flags, until `reset(options={"reset_mask": bool array})`).

Two faces: `reset`, `step` and `close` block; `areset`, `astep` and `aclose` are the same for callers on an event loop,
asyncio's or trio's, whose cancellation ends what is under way and with it the environments. Lock-step suits looking and
evaluating; for training, episodes of uneven length belong into the pipeline. `close` ends what is under way and frees
everything; so does the end of the main thread.

A call waits for all environments, though no longer than `timeout`, then raises the first error, with a note saying
whose it is; the answers of the others stand. An environment that hung, was interrupted or failed to reset must be
reset, by `reset_mask` alone or with the others.
"""

from __future__ import annotations

import concurrent.futures
import logging
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import anyio
import gymnasium
import numpy as np
from anyio import to_thread
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from skyenv.core import Env
from skyenv.errors import ConfigError, DeadlineExceeded, ResetNeeded
from skyenv.portal import Actor, Portal
from skyenv.types import Step, ToolCall
from skyenv.vector.closing import close

logger = logging.getLogger(__name__)
Action = ToolCall | Mapping[str, Any]
T = TypeVar("T")
CLOSE_TIMEOUT = 60.0
_MODES = {mode.name.lower(): mode for mode in AutoresetMode}


class SkyVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` environments made by what `environments` yields; the context is entered here and left by `close`.

    Observations and actions are tuples, rewards float64 and flags bool arrays of shape (num_envs,); in infos every key
    holds an object array and `_key` the mask of the environments that set it. An action is a mapping or a `ToolCall`.
    The step that ends an episode evaluates it: infos then have `verdict` and `stop_reason`. An environment that is not
    done `timeout` seconds after a call began is freed and reported as DeadlineExceeded.
    """

    def __init__(
        self,
        environments: AbstractAsyncContextManager[Callable[[], Env]],
        num_envs: int,
        *,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        autoreset_mode: AutoresetMode | str | None = None,
        timeout: float = 3600.0,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs: {num_envs} is too few; use at least 1")
        if timeout <= 0:
            raise ConfigError(f"timeout: {timeout:g} s is no time; use more than 0")
        self._mode = _mode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self._mode}
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self._timeout = timeout
        self._last: list[Step | None] = [None] * num_envs
        self._running: dict[int, concurrent.futures.Future[Any]] = {}
        self._lock = threading.Lock()  # around calls that begin, and the end of all
        self._ending = False
        self._portal = Portal()
        self._context = self._portal.enter(environments)
        with ExitStack() as undo:
            undo.callback(self._portal.close)
            make_env = self._context.__enter__()
            self._envs = [make_env() for _ in range(num_envs)]
            self._actors = [self._portal.actor(partial(_freed, env)) for env in self._envs]
            undo.pop_all()

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Start episodes, all or those of `options["reset_mask"]`; an int seed gives environment i seed + i."""
        self._check_open()
        rest = dict(options or {})
        mask = rest.pop("reset_mask", None)
        chosen = [True] * self.num_envs if mask is None else [bool(flag) for flag in mask]
        seeds = _seeds(seed, self.num_envs)
        if len(chosen) != self.num_envs or len(seeds) != self.num_envs:
            raise ConfigError(f"reset_mask and a list of seeds need {self.num_envs} items")
        self._run([partial(self._reset_one, i, seeds[i], rest) if chosen[i] else None for i in range(self.num_envs)])
        observations, _, _, _, infos = self._batch([_has_reset(answer) for answer in self._last])
        return observations, infos

    def step(self, actions: Sequence[Action]) -> tuple[tuple[str, ...], Any, Any, Any, dict[str, Any]]:
        """Step every environment at once; see the module for what happens after an episode's end."""
        self._check_open()
        if len(actions) != self.num_envs:
            raise ConfigError(f"{len(actions)} actions for {self.num_envs} environments")
        answers = [_has_reset(answer) for answer in self._last]
        self._run([self._next(i, actions[i], answers[i]) for i in range(self.num_envs)])
        return self._batch([_has_reset(answer) for answer in self._last])

    async def areset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """As `reset`, for callers on an event loop."""
        return await self._awaited(partial(self.reset, seed=seed, options=options))

    async def astep(self, actions: Sequence[Action]) -> tuple[tuple[str, ...], Any, Any, Any, dict[str, Any]]:
        """As `step`, for callers on an event loop."""
        return await self._awaited(partial(self.step, actions))

    async def aclose(self) -> None:
        """As `close`, for callers on an event loop; not cut short by cancellation."""
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self.close)

    async def _awaited(self, call: Callable[[], T]) -> T:
        """One thread waits for all environments; cancellation ends what it waits for."""
        try:
            return await to_thread.run_sync(call, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            self._interrupt()
            raise

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment, then the connection and the thread."""
        with self._lock:
            self._ending = True
            for actor in self._actors:
                actor.cancel()
        with ExitStack() as stack:
            stack.callback(self._portal.close)
            stack.callback(self._context.__exit__, None, None, None)
            with concurrent.futures.ThreadPoolExecutor(self.num_envs) as pool:
                stack.callback(list, pool.map(Actor.close, self._actors))

    def _next(self, i: int, action: Action, last: Step) -> Callable[[], Any] | None:
        if self._mode is AutoresetMode.SAME_STEP or not (last.terminated or last.truncated):
            return partial(self._step_one, i, action)
        if self._mode is AutoresetMode.NEXT_STEP:
            return partial(self._reset_one, i, None, {})
        self._last[i] = last._replace(reward=0.0)
        return None

    async def _reset_one(self, i: int, seed: int | None, options: Mapping[str, Any]) -> None:
        self._last[i] = None
        observation, info = await self._envs[i].areset(seed=seed, options=options)
        self._last[i] = Step(observation, 0.0, False, False, info)

    async def _step_one(self, i: int, action: Action) -> None:
        step = await self._envs[i].astep(action)
        if step.terminated or step.truncated:
            reward, verdict = await self._envs[i].aevaluate()
            step = step._replace(reward=reward or 0.0, info={**step.info, "verdict": verdict})
            if self._mode is AutoresetMode.SAME_STEP:
                observation, info = await self._envs[i].areset()
                final = {"final_obs": step.observation, "final_info": step.info}
                step = step._replace(observation=observation, info={**info, **final})
        self._last[i] = step

    def _run(self, calls: Sequence[Callable[[], Any] | None]) -> None:
        """Run the calls together and wait for all; an interrupt ends the environments, the first error is raised."""
        with self._lock:
            self._check_open()
            self._running = {i: self._actor(i).submit(call) for i, call in enumerate(calls) if call}
        try:
            _, late = concurrent.futures.wait(self._running.values(), self._timeout)
        finally:
            self._interrupt()
        failed = {i: _error(future, future in late, self._timeout) for i, future in self._running.items()}
        errors = {i: error for i, error in failed.items() if error is not None}
        for i, error in errors.items():
            error.add_note(f"environment {i} of {self.num_envs}; failed: {', '.join(map(str, errors))}")
            raise error

    def _actor(self, i: int) -> Actor:
        """The actor of an environment; a new one after an interrupt, once the old one has freed what it held."""
        if self._actors[i].ended:
            self._actors[i].close()
            self._actors[i] = self._portal.actor(partial(_freed, self._envs[i]))
        return self._actors[i]

    def _interrupt(self) -> None:
        """End what is under way; its environments must be reset."""
        for i, future in self._running.items():
            if not future.done():
                self._last[i] = None
                self._actors[i].cancel()

    def _check_open(self) -> None:
        if self._ending:
            raise ResetNeeded("the vector environment is closed")

    def _batch(self, answers: Sequence[Step]) -> tuple[tuple[str, ...], Any, Any, Any, dict[str, Any]]:
        observations = tuple(answer.observation for answer in answers)
        rewards = np.array([answer.reward for answer in answers], dtype=np.float64)
        terminated = np.array([answer.terminated for answer in answers], dtype=np.bool_)
        truncated = np.array([answer.truncated for answer in answers], dtype=np.bool_)
        return observations, rewards, terminated, truncated, _batch_infos([answer.info for answer in answers])


def _batch_infos(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Nested values stay whole, as Gymnasium would take a verdict apart key by key; `final_info` is batched itself."""
    batched: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        column = np.full(len(infos), None, dtype=object)
        for i, info in enumerate(infos):
            column[i] = info.get(key)
        batched[key] = _batch_infos([final or {} for final in column]) if key == "final_info" else column
        batched[f"_{key}"] = np.array([key in info for info in infos], dtype=np.bool_)
    return batched


def _seeds(seed: Any, count: int) -> Sequence[int | None]:
    """One for each environment, of whatever Gymnasium's callers give."""
    if seed is None:
        return [None] * count
    if isinstance(seed, numbers.Integral):
        return [int(seed) + i for i in range(count)]
    return [None if each is None else int(each) for each in seed]


def _error(future: concurrent.futures.Future[Any], late: bool, timeout: float) -> BaseException | None:
    """What went wrong with a call."""
    if late:
        return DeadlineExceeded(f"the environment did not answer within {timeout:g} s")
    error = ResetNeeded("interrupted") if future.cancelled() else future.exception()
    return ResetNeeded("interrupted") if isinstance(error, anyio.ClosedResourceError) else error


async def _freed(env: Env) -> None:
    """Close an environment, whatever ends its actor."""
    error = await close(env, CLOSE_TIMEOUT)
    if error is not None:
        logger.warning("not closed: %s", error)


def _has_reset(answer: Step | None) -> Step:
    if answer is None:
        raise ResetNeeded("call reset first")
    return answer


def _mode(mode: AutoresetMode | str | None) -> AutoresetMode:
    if mode is None:
        return AutoresetMode.NEXT_STEP
    if isinstance(mode, str) and mode.lower() in _MODES:
        return _MODES[mode.lower()]
    if mode in _MODES.values():
        return AutoresetMode(mode)
    raise ConfigError(f"autoreset_mode: {mode!r} is not one of {', '.join(_MODES)}")
