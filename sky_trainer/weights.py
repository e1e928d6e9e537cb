"""How an engine comes to sample from the weights that the trainer has now.

The version of a policy is the number of optimizer steps behind it. Every completion carries the version it was
sampled with, so that staleness is a fact in the record and not an assumption.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from skyenv.errors import EngineError

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal


class WeightSyncFailed(EngineError):
    """No engine could be brought to the trainer's weights; the message names each and why."""


class WeightsNotVisible(EngineError):
    """An engine took an update and yet does not sample from the trainer's weights.

    `gap` is the mean difference of a probe's logprobs in nats.
    """

    def __init__(self, url: str, version: int, gap: float, cause: str) -> None:
        super().__init__(f"{url} does not sample from version {version}: {cause}")
        self.url, self.version, self.gap, self.cause = url, version, gap, cause


class WeightSync(Protocol):
    """Brings the trainer's weights to where the engine samples from. Called from the trainer's thread only."""

    @property
    def version(self) -> int:
        """Version that new completions are sampled with."""
        ...

    def push(self, version: int) -> None:
        """Return once every later completion is sampled from the trainer's weights as they are now.

        `version` never decreases. Raises `EngineError` when the engine could not be updated.
        """
        ...


class VersionedEngine(Protocol):
    """An engine in this process that writes `policy_version` on its completions."""

    policy_version: int


class SharedWeights:
    """Trainer and engine hold the same module: nothing to copy, only the version to count."""

    def __init__(self, engine: VersionedEngine) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        """Version that the engine writes on completions."""
        return self._engine.policy_version

    def push(self, version: int) -> None:
        """Tell the engine which version its module holds now. ValueError when the version goes back."""
        if version < self._engine.policy_version:
            raise ValueError(f"policy version {version} after {self._engine.policy_version}")
        self._engine.policy_version = version


class ReplaceableEngine(VersionedEngine, Protocol):
    """An engine in this process that holds a module of its own."""

    def replace(self, load: Callable[[Any], None], version: int) -> Awaitable[None]:
        """Change the module's weights by `load(module)` between two decoding steps."""
        ...


class CopiedWeights:
    """The engine holds a copy of the trainer's module: rollouts go on while the trainer steps.

    A push copies every parameter and buffer in place, between two decoding steps. `model` is the trainer's module; the
    engine's has the same names and shapes, as `copy.deepcopy` makes it.
    """

    def __init__(self, portal: BlockingPortal, engine: ReplaceableEngine, model: Any) -> None:
        self._portal = portal
        self._engine = engine
        self._model = model

    @property
    def version(self) -> int:
        """Version that the engine writes on completions."""
        return self._engine.policy_version

    def push(self, version: int) -> None:
        """Copy the weights as they are now. ValueError when the version goes back."""
        self._portal.call(self._engine.replace, self._copy, version)

    def _copy(self, target: Any) -> None:
        import torch

        theirs, ours = target.state_dict(), self._model.state_dict()
        with torch.no_grad():
            for name, value in theirs.items():
                value.copy_(ours[name])
