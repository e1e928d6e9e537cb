"""Task sets: named ones, files, folders and data sets of the Hugging Face hub, read one row at a time.

Nothing is fetched but the rows themselves. A row is checked in full when it is reached; what is wrong with it is a
ConfigError that names file, row and field. Evaluation records that lie beside a set are attached to its tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyenv.envs.swe.datasets import find_dataset, parse_row
from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.reading import SEPARATOR, hub_name, read_rows, read_selection
from skyenv.envs.swe.records import read_records, records_path
from skyenv.envs.swe.tasks import Record, SweTask
from skyenv.errors import ConfigError, did_you_mean

DATA = Path(__file__).parent / "data"
_PLACES = {"builtin": "builtin", "pypi": "pypi.yaml", "mutated": "mutated.jsonl"}
NAMED_SETS = tuple(_PLACES)
Refused = Callable[[ConfigError], None]
TaskSet = str | Path | Sequence["SweTask | str | Mapping[str, Any]"]
"""A set's name (`builtin`, `pypi`, `mutated`), a file, a folder, a data set of the Hugging Face hub (`owner/name`,
`hf:NAME`, each with `@split`), any of these behind a data set's name and a colon (`swe-gym:rows.jsonl`), or a sequence
of tasks, rows and ids of the named sets."""


def load_tasks(tasks: TaskSet, *, refused: Refused | None = None, admitted: bool = True) -> list[SweTask]:
    """Read a whole set. ConfigError for a broken row, a doubled id, an unknown name, an empty set.

    With `refused`, broken rows and doubled ids are told to it and left out. Without `admitted`, tasks are as their
    rows say, whatever their records found.
    """
    found: dict[str, SweTask] = {}
    for task in iter_tasks(tasks, refused=refused, admitted=admitted):
        if task.task_id in found:
            error = ConfigError(f"tasks: task_id {task.task_id!r} occurs twice; ids must be unique within a set")
            if refused is None:
                raise error
            refused(error)
        else:
            found[task.task_id] = task
    if not found and refused is None:
        raise ConfigError(f"tasks: {tasks!r} holds no task")
    return list(found.values())


def iter_tasks(tasks: TaskSet, *, refused: Refused | None = None, admitted: bool = True) -> Iterator[SweTask]:
    """The tasks of a set, one at a time; see `load_tasks`."""
    if not isinstance(tasks, str | Path):
        for number, item in enumerate(tasks):
            yield _one(item, number)
    elif str(tasks) in NAMED_SETS:
        yield from _named(str(tasks)) if admitted else _read(_place_of(str(tasks)), None, {}, refused)
    elif (stage := read_selection(Path(tasks))) is not None:
        yield from _selected(*stage, Path(tasks), refused, admitted)
    else:
        dataset, place = split_place(str(tasks))
        yield from _read(place, dataset, read_records(records_path(tasks)) if admitted else {}, refused)


def _read(
    place: str, dataset: str | None, records: Mapping[str, Record], refused: Refused | None = None
) -> Iterator[SweTask]:
    for row in _rows(place):
        try:
            task = parse_row(row, dataset)
        except ConfigError as error:
            if refused is None:
                raise
            refused(error)
            continue
        record = records.get(task.task_id)
        yield task.admitted(record) if record is not None and record.digest == task.digest else task


def _selected(
    origin: str, ids: Sequence[str], path: Path, refused: Refused | None, admitted: bool
) -> Iterator[SweTask]:
    place = path.parent / origin
    source = str(place) if place.exists() and origin not in NAMED_SETS else origin
    known = {task.task_id: task for task in iter_tasks(source, refused=refused, admitted=admitted)}
    for task_id in ids:
        if task_id not in known:
            raise ConfigError(f"{path}: ids: {origin} has no task {task_id!r}{did_you_mean(task_id, known)}")
        yield known[task_id]


def _place_of(name: str) -> str:
    return str(DATA / _PLACES[name])


def split_place(tasks: str) -> tuple[str | None, str]:
    """Part `DATASET:PLACE`; the data set is None when none is named. ConfigError for an unknown one."""
    name, colon, place = tasks.partition(SEPARATOR)
    if not colon or Path(tasks).exists() or name == "hf" or "/" in name:
        return None, tasks
    return find_dataset(name).name, place


def _one(item: SweTask | str | Mapping[str, Any], number: int) -> SweTask:
    if isinstance(item, SweTask):
        return item
    return _by_id(item) if isinstance(item, str) else parse_row(Row(item, f"tasks[{number}]", Path.cwd()))


def _rows(place: str) -> Iterator[Row]:
    if not Path(place).exists() and hub_name(place) is None:
        known, hint = ", ".join(NAMED_SETS), did_you_mean(place, NAMED_SETS)
        raise ConfigError(f"tasks: {place!r} is neither a set ({known}) nor a file or folder{hint}")
    return read_rows(place)


@functools.cache
def _named(name: str) -> tuple[SweTask, ...]:
    """The sets that ship with the package, with records that do too; they never change while it runs."""
    place = _place_of(name)
    return tuple(_read(place, None, {**read_records(records_path(name)), **read_records(records_path(place))}))


def _by_id(task_id: str) -> SweTask:
    known = [task for name in NAMED_SETS for task in _named(name)]
    for task in known:
        if task.task_id == task_id:
            return task
    hint = did_you_mean(task_id, (task.task_id for task in known))
    raise ConfigError(f"tasks: no task {task_id!r} in the sets {', '.join(NAMED_SETS)}{hint}")
