"""The synchronous face of an environment: Gymnasium's `reset`, `step`, `close` over the asynchronous methods.

The calls run on one portal thread in one task, started by the first of them and ended by `close`. The step that ends an
episode also evaluates it, so a plain loop sees the reward. Ctrl-C in a call ends the episode and frees what it holds.
Use one face of an instance, not both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium

from skyenv.core import Env
from skyenv.portal import Actor, Portal
from skyenv.types import Step, ToolCall


async def step_and_evaluate(env: Env, action: ToolCall | Mapping[str, Any]) -> Step:
    """Run one action; when it ends the episode, add the reward (0.0 if invalid) and `verdict` and `stop_reason`."""
    step = await env.astep(action)
    if not (step.terminated or step.truncated):
        return step
    reward, verdict = await env.aevaluate()
    return step._replace(reward=0.0 if reward is None else reward, info={**step.info, "verdict": verdict})


class GymnasiumEnv(Env, gymnasium.Env[str, Any]):
    """An `Env` that is a `gymnasium.Env` too. Subclasses set `observation_space` and `action_space`.

    `areset` of a subclass calls `seed_episode` first.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  Gymnasium's name and type
    _portal: Portal | None = None
    _actor: Actor | None = None

    def seed_episode(self, seed: int | None) -> None:
        """Seed `np_random` as Gymnasium does: only when a seed is given."""
        gymnasium.Env.reset(self, seed=seed)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; see `areset`."""
        return self._face().call(partial(self.areset, seed=seed, options=options))

    def step(self, action: ToolCall | Mapping[str, Any]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run one action; see `astep`. At the end of the episode info has `verdict` and `stop_reason`."""
        observation, reward, terminated, truncated, info = self._face().call(partial(step_and_evaluate, self, action))
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Free everything that the synchronous calls opened; idempotent."""
        portal, actor = self._portal, self._actor
        self._portal = self._actor = None
        if portal is not None and actor is not None:
            try:
                actor.close()
            finally:
                portal.close()

    def _face(self) -> Actor:
        if self._portal is None:
            self._portal = Portal()
        if self._actor is not None and self._actor.ended:
            self._actor.close()  # an interrupted one may still be freeing what it held
            self._actor = None
        if self._actor is None:
            self._actor = self._portal.actor(self.aclose)
        return self._actor
