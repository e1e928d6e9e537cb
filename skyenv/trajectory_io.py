"""Trajectories as JSON lines: one object a line, readable transcript and packed exact ids side by side.

Invariants: a line is appended by a single write while an exclusive lock is held, so concurrent writers never
interleave and a crash damages at most the last line; what was read back equals what was written, floats included.
A damaged line is reported and skipped, never repaired; everything before and after it is kept.
"""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import os
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skyenv.errors import ConfigError, boundary
from skyenv.types import Failure, Message, Segment, StopReason, ToolCall, Trajectory, Turn

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of the line format; a reader takes older lines too and refuses those of a newer one.

Since 2 the arrays of a segment are packed: little-endian 32-bit ids, one byte a mask, 64-bit logprobs of the sampled
ids alone, each deflated and in base 64. Format 1 wrote them as JSON lists.
"""


_NUMBER = (int, float)
_FIELDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("task_id", "prompt_hash"), (str,)),
        **dict.fromkeys(("group_id", "sample_index", "attempts"), (int,)),
        **dict.fromkeys(("verdict", "seconds", "counters"), (dict,)),
        "reward": (*_NUMBER, type(None)),
        "exact": (bool,),
    }
)
_TURN_FIELDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("text", "observation"), (str,)),
        **dict.fromkeys(("generate_seconds", "step_seconds", "policy_version"), _NUMBER),
        "error": (str, type(None)),
    }
)


def append_trajectories(path: Path, trajectories: Iterable[Trajectory], **extra: Any) -> None:
    """Append one line a trajectory; `extra` JSON values (a training step, say) stand on each line.

    Creates the file and its folder. Blocks on the disk: call it in a thread from async code. OSError when the disk
    refuses; a line cut short by an earlier crash is closed first so that it spoils no other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            _write(descriptor, b"\n")
        for trajectory in trajectories:
            line = json.dumps({**extra, **trajectory_to_json(trajectory)}, ensure_ascii=False, default=str)
            _write(descriptor, line.encode("utf-8", "backslashreplace") + b"\n")
    finally:
        os.close(descriptor)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file in order; a damaged line is logged with its number and skipped.

    Raises ConfigError when the file is missing or cannot be read.
    """
    return (trajectory for _record, trajectory in read_records(path))


def read_records(path: Path) -> Iterator[tuple[Mapping[str, Any], Trajectory]]:
    """As `read_trajectories`, each beside all that its line holds."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    found = _parsed(line)
                except ConfigError as error:
                    logger.warning("%s line %d skipped: %s", path, number, error)
                else:
                    yield found
    except OSError as error:
        raise ConfigError(f"trajectories: cannot read {path}: {error.strerror}") from error


def _parsed(line: bytes) -> tuple[Mapping[str, Any], Trajectory]:
    """What a line holds; ConfigError for whatever else a line can hold."""
    with boundary(ConfigError, "no trajectory" if line.endswith(b"\n") else "cut short"):
        record: Mapping[str, Any] = json.loads(line)
        return record, trajectory_from_json(record)


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """As JSON values: the readable fields first, the packed arrays of the segments last."""
    segments = [_pack_segment(segment) for segment in trajectory.segments]
    record = {
        "format": FORMAT,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "failure": asdict(trajectory.failure) if trajectory.failure else None,
        "attempts": trajectory.attempts,
        "exact": trajectory.exact,
        "seconds": trajectory.seconds,
        "counters": trajectory.counters,
        "prompt_hash": trajectory.prompt_hash,
        "verdict": trajectory.verdict,
        "prompt": [{"role": m.role, "content": m.content, "name": m.name} for m in trajectory.prompt],
        "turns": [_turn_to_json(turn) for turn in trajectory.turns],
        "segments": segments,
    }
    return record


def trajectory_from_json(record: Mapping[str, Any]) -> Trajectory:
    """The inverse of `trajectory_to_json`; unknown keys are ignored.

    Raises ValueError for a newer format or segments that break their invariants, KeyError or TypeError for other
    objects.
    """
    if record["format"] > FORMAT:
        raise ValueError(f"line format {record['format']} is newer than {FORMAT}")
    _check(record, _FIELDS)
    _check(record["seconds"], dict.fromkeys(record["seconds"], _NUMBER))
    _check(record["counters"], dict.fromkeys(record["counters"], (int,)))
    read = Segment if record["format"] == 1 else _unpack_segment
    segments = [read(**segment) for segment in record["segments"]]
    for segment in segments:
        segment.check()
    return Trajectory(
        task_id=record["task_id"],
        group_id=record["group_id"],
        sample_index=record["sample_index"],
        prompt=tuple(Message(**message) for message in record["prompt"]),
        segments=segments,
        turns=[_turn_from_json(turn) for turn in record["turns"]],
        reward=record["reward"],
        verdict=record["verdict"],
        stop_reason=StopReason(record["stop_reason"]) if record["stop_reason"] else None,
        failure=Failure(**record["failure"]) if record["failure"] else None,
        exact=record["exact"],
        attempts=record["attempts"],
        seconds=record["seconds"],
        counters=record["counters"],
        prompt_hash=record["prompt_hash"],
    )


def _check(record: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    """TypeError naming the first entry that is of another kind, KeyError for one that is missing."""
    for name, allowed in kinds.items():
        if not isinstance(record[name], allowed):
            raise TypeError(f"{name} is {str(record[name])[:80]!r}, a {type(record[name]).__name__}")


def _pack_segment(segment: Segment) -> dict[str, Any]:
    sampled = [logprob for logprob, mask in zip(segment.logprobs, segment.loss_mask, strict=True) if mask]
    return {
        "length": len(segment.token_ids),
        "token_ids": _packed("i", segment.token_ids),
        "loss_mask": _packed("b", segment.loss_mask),
        "logprobs": _packed("d", sampled),
    }


def _unpack_segment(length: int, token_ids: str, loss_mask: str, logprobs: str) -> Segment:
    ids, mask, sampled = _unpacked("i", token_ids), _unpacked("b", loss_mask), _unpacked("d", logprobs)
    if not len(ids) == len(mask) == length or sum(mask) != len(sampled):
        found = f"{len(ids)} ids, {len(mask)} masks of which {sum(mask)} are 1, and {len(sampled)} logprobs"
        raise ValueError(f"unequal arrays: a segment of length {length} has {found}")
    rest = iter(sampled)
    return Segment(ids, mask, [next(rest) if trained else 0.0 for trained in mask])


def _packed(code: str, values: Sequence[float]) -> str:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(zlib.compress(packed.tobytes(), 1)).decode("ascii")


def _unpacked(code: str, text: str) -> list[Any]:
    values = array(code)
    values.frombytes(zlib.decompress(base64.b64decode(text)))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls]
    return {
        "text": turn.text,
        "calls": calls,
        "observation": turn.observation,
        "error": turn.error,
        "finish_reason": turn.finish_reason,
        "policy_version": turn.policy_version,
        "generate_seconds": turn.generate_seconds,
        "step_seconds": turn.step_seconds,
        "reward": turn.reward,
        "versions": [list(span) for span in turn.versions],
    }


def _turn_from_json(record: Mapping[str, Any]) -> Turn:
    _check(record, _TURN_FIELDS)
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in record["calls"])
    versions = tuple((count, version) for count, version in record.get("versions", ()))
    return Turn(**{**record, "calls": calls, "versions": versions})


def _write(descriptor: int, data: bytes) -> None:
    """All of `data`; one system call unless the kernel takes less."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
