"""What a sharded pipeline says between its processes, and how that is written as bytes.

Orders, results and the configuration are JSON, so that nothing a sandbox printed is ever unpickled. What was read
equals what was written; anything else is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from skyenv.errors import ConfigError, boundary
from skyenv.trajectory_io import trajectory_from_json, trajectory_to_json
from skyenv.types import Trajectory
from skyenv.vector.timeline import Lifeline, lifeline_from_json, lifeline_to_json

STATES = ("init_wait", "init", "run_wait", "run", "eval_wait", "eval", "close")


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A pipeline as data: `package.module:function`, which takes `options` (JSON values).

    The function returns an asynchronous context manager of the RolloutPipeline, open for as long as the shard lives.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """For the wire. ConfigError when the options are no JSON values."""
        with boundary(ConfigError, "options of a sharded pipeline must be JSON values"):
            return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PipelineSpec:
        """The inverse of `to_bytes`."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Portion:
    """What a shard is handed at once: samples of one group. `number` is its name between the two sides."""

    number: int
    task_id: str
    group_id: int
    samples: tuple[int, ...]
    enough: int | None = None
    priority: int = 0

    def to_bytes(self) -> bytes:
        """For the wire."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Portion:
        """The inverse of `to_bytes`."""
        fields = json.loads(data)
        return cls(**{**fields, "samples": tuple(fields["samples"])})


@dataclass(frozen=True, slots=True)
class Result:
    """A trajectory of a portion."""

    number: int
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class End:
    """A portion is over and freed; `error` says why before its time. `config`: the user can change it."""

    number: int
    error: str | None = None
    config: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: the numbers of the shard's meter, and how many samples of each portion are in which state.

    The counts of a portion are in the order of `STATES`.
    """

    numbers: Mapping[str, float]
    portions: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Lived:
    """What trajectories that came back went through, where the pipeline's meter keeps a timeline.

    Their times count from `origin`, in seconds since 1970 by the shard's clock.
    """

    origin: float
    lifelines: tuple[Lifeline, ...]


Word = Result | End | Beat | Lived


@runtime_checkable
class Versioned(Protocol):
    """An engine that stamps completions with a version that it is told."""

    policy_version: int


def write_words(words: Sequence[Word]) -> list[bytes]:
    """For the wire. Takes some 50 ms for a trajectory of 32 000 ids: call it in a thread."""
    return [json.dumps(_written(word), default=str).encode() for word in words]


def read_words(words: Sequence[bytes]) -> list[Word]:
    """The inverse of `write_words`. ValueError, KeyError or TypeError for anything else."""
    return [_read(json.loads(word)) for word in words]


def _written(word: Word) -> dict[str, Any]:
    match word:
        case Result(number, trajectory):
            return {"number": number, "trajectory": trajectory_to_json(trajectory)}
        case End():
            return {"end": asdict(word)}
        case Beat(numbers, portions):
            return {"numbers": dict(numbers), "portions": dict(portions)}
        case Lived(origin, lifelines):
            return {"lifelines": [lifeline_to_json(line) for line in lifelines], "origin": origin}


def _read(word: Mapping[str, Any]) -> Word:
    if "trajectory" in word:
        return Result(word["number"], trajectory_from_json(word["trajectory"]))
    if "end" in word:
        return End(**word["end"])
    if "lifelines" in word:
        return Lived(word["origin"], tuple(lifeline_from_json(row) for row in word["lifelines"]))
    return Beat(word["numbers"], {int(number): tuple(counts) for number, counts in word["portions"].items()})
