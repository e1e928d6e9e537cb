"""One generation for a trajectory: what an engine is asked, and whether its answer is one.

Siblings and turns differ in their seeds, reruns do not; the session's id is stable over an attempt, for routing.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from skyenv.core import Engine
from skyenv.errors import EngineError, boundary
from skyenv.renderer import Renderer
from skyenv.types import Completion, Message, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class Sampler:
    """Asks an engine on behalf of one trajectory. `turn_timeout` in seconds, for the message of a passed deadline."""

    engine: Engine
    renderer: Renderer
    trajectory: Trajectory
    sampling: SamplingParams
    turn_timeout: float

    async def sample(
        self, ids: tuple[int, ...], messages: Sequence[Message], *, turn: int, max_tokens: int, deadline: float
    ) -> Completion:
        """One completion, checked against what was asked for. Raises EngineError."""
        wanted = self._wanted(turn, max_tokens)
        with anyio.CancelScope(deadline=deadline), boundary(EngineError, "engine"):
            completion = await self.engine.generate(ids, wanted, messages=messages, session_id=self._session_id)
            return _checked(completion, max_tokens)
        raise EngineError(f"no completion within {self.turn_timeout:g} s")

    def _wanted(self, turn: int, max_tokens: int) -> SamplingParams:
        seed, trajectory = self.sampling.seed, self.trajectory
        if seed is not None:
            seed = zlib.crc32(f"{seed} {trajectory.task_id} {trajectory.sample_index} {turn}".encode()) >> 1
        stops = self.sampling.stop_token_ids or tuple(self.renderer.stop_token_ids)
        return replace(self.sampling, max_tokens=max_tokens, stop_token_ids=stops, seed=seed)

    @property
    def _session_id(self) -> str:
        trajectory = self.trajectory
        return f"{trajectory.task_id}#{trajectory.group_id}.{trajectory.sample_index}.{trajectory.attempts}"


def _checked(completion: Completion, max_tokens: int) -> Completion:
    """The completion; EngineError when it is not what an engine may answer."""
    if completion.finish_reason == "abort":
        raise EngineError("the engine aborted the generation")
    if not _are_ids(completion.token_ids):
        raise EngineError(f"the engine answered what are no token ids: {str(completion.token_ids)[:100]}")
    if len(completion.token_ids) > max_tokens:
        raise EngineError(f"the engine answered {len(completion.token_ids)} tokens for max_tokens {max_tokens}")
    if not all(math.isfinite(value) and value <= 1e-4 for value in completion.logprobs):
        raise EngineError("the engine answered a logprob that is no log probability")
    return completion


def _are_ids(values: Sequence[int]) -> bool:
    """Whether these are the 32-bit numbers that everything behind an engine takes for ids."""
    try:
        return min(array("i", values), default=0) >= 0
    except (TypeError, OverflowError):
        return False
