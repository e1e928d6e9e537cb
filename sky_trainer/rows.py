"""Trajectories as rows of a table, for supervised training or offline RL elsewhere: one row a segment, or one a turn.

Every row has `token_ids`, `loss_mask` and `logprobs` of equal length; what a row holds of its trajectory is decided by
`skyenv.samples`, as for training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sky_trainer.files import appearing
from skyenv.errors import ConfigError
from skyenv.samples import parts_of
from skyenv.types import Segment, Trajectory

RowKind = Literal["segment", "turn"]


def rows_of(trajectory: Trajectory, kind: RowKind = "segment") -> Iterator[dict[str, Any]]:
    """The rows of one trajectory, in order; none for one without sampled ids."""
    for number, part in enumerate(parts_of(trajectory, kind)):
        yield {**_facts(trajectory), "row": number, "first_turn": part.first_turn, **_arrays(part.segment)}


def check_export(path: Path) -> None:
    """ConfigError for a file that rows cannot be written to."""
    if path.suffix not in WRITERS:
        raise ConfigError(f"--export {path}: must end with .parquet or .jsonl, or have no ending")
    if path.suffix and path.is_dir():
        raise ConfigError(f"--export {path}: is a directory")


def export_rows(path: Path, trajectories: Iterable[Trajectory], kind: RowKind) -> int:
    """Write rows to a parquet, JSON Lines file or, without an ending, a directory of a Hugging Face dataset.

    What is there is replaced once the new one is whole. Returns how many. ConfigError when there is nothing to write or
    the disk refuses.
    """
    check_export(path)
    rows = [row for trajectory in trajectories for row in rows_of(trajectory, kind)]
    if not rows:
        raise ConfigError(f"--export {path}: no trajectory has sampled ids; text-only servers return none")
    from datasets import Dataset

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as partial:
            WRITERS[path.suffix](Dataset.from_list(rows), str(partial))
    except OSError as error:
        raise ConfigError(f"--export {path}: {error.strerror or error}") from error
    return len(rows)


WRITERS: Mapping[str, Callable[[Any, str], Any]] = MappingProxyType(
    {
        ".parquet": lambda dataset, path: dataset.to_parquet(path),
        ".jsonl": lambda dataset, path: dataset.to_json(path),
        "": lambda dataset, path: dataset.save_to_disk(path),
    }
)


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "task_id": trajectory.task_id,
        "sample_index": trajectory.sample_index,
        "reward": trajectory.reward,
        "resolved": bool(trajectory.verdict.get("resolved")),
        "stop_reason": str(trajectory.stop_reason or ""),
        "exact": trajectory.exact,
        "messages": _messages(trajectory),
    }


def _messages(trajectory: Trajectory) -> list[dict[str, str]]:
    messages = [{"role": message.role, "content": message.content} for message in trajectory.prompt]
    for turn in trajectory.turns:
        messages.append({"role": "assistant", "content": turn.text})
        if turn.observation:
            messages.append({"role": "tool", "content": turn.observation})
    return messages


def _arrays(segment: Segment) -> dict[str, Any]:
    return {
        "prompt_length": segment.prompt_length,
        "token_ids": segment.token_ids,
        "loss_mask": segment.loss_mask,
        "logprobs": segment.logprobs,
    }
