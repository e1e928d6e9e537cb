"""Evaluation records: one JSON object a line in a file beside the task set, the last one of a task counts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyenv.envs.swe.sources import default_cache
from skyenv.envs.swe.tasks import Record, SweTask
from skyenv.errors import ConfigError

_FIELDS = {field.name for field in dataclasses.fields(Record)}


def records_path(tasks: object) -> Path:
    """Where the records of a set lie: beside a file or folder, in the cache for named sets and those of the hub.

    The named sets also bring records along, beside their files in the package.
    """
    place = str(tasks)
    path = Path(place)
    if not path.exists() and ":" in place:
        path = Path(place.partition(":")[2])
    if path.is_dir():
        return path.parent / f"{path.name}.records.jsonl"
    if path.is_file():
        return path.with_name(f"{path.stem}.records.jsonl")
    name = re.sub(r"[^\w.-]+", "_", place)
    return default_cache() / "records" / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}.jsonl"


def read_records(path: Path) -> dict[str, Record]:
    """The records of a file by task id; none when there is no file. ConfigError for a broken line."""
    if not path.is_file():
        return {}
    records = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                record = _parse(line, f"{path}: line {number}")
                records[record.task_id] = record
    return records


def _parse(line: bytes, where: str) -> Record:
    try:
        fields: Any = json.loads(line)
        if not isinstance(fields, Mapping) or set(fields) != _FIELDS:
            raise ConfigError(f"{where}: must hold exactly {', '.join(sorted(_FIELDS))}; validate the task again")
        return Record(**{**fields, "flaky": tuple(fields["flaky"]), "allow": tuple(fields["allow"])})
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not a record: {error}; validate the task again") from error


def write_records(path: Path, records: Iterable[Record], *, gone: Iterable[str] = ()) -> None:
    """Put records into a file beside those that are there, without those of the tasks `gone`. ConfigError."""
    kept = {**read_records(path), **{record.task_id: record for record in records}}
    for task_id in gone:
        kept.pop(task_id, None)
    lines = [json.dumps(dataclasses.asdict(record), sort_keys=True) + "\n" for _, record in sorted(kept.items())]
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("".join(lines), "utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"records: {path}: {error.strerror}; choose another place with --out") from error


def require_records(tasks: Sequence[SweTask], source: object) -> None:
    """ConfigError unless every task was admitted, naming the first that was not and the command that does it."""
    missing = [task.task_id for task in tasks if task.record is None]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigError(
            f"tasks: {missing[0]!r}{others} of {source} has no evaluation record, so nothing says that a reward would "
            f"mean anything; run `skyenv tasks validate {source}`"
        )
