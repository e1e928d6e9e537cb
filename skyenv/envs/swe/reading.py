"""Rows of task sets as they lie in files, folders and data sets of the Hugging Face hub, one at a time.

Line ends inside of values are kept. A folder holds tasks in folders of their own, or data files in any depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from skyenv.envs.swe.fields import Row, text, texts
from skyenv.errors import ConfigError, SourceUnavailable

SEPARATOR = ":"
HARBOR, TERMINAL_BENCH = "harbor_task", "terminal_bench_task"
"""Fields that mark a row as a folder of that kind; the value is the folder."""
_HUB = re.compile(r"(?:hf:(?P<any>.+?)|(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+))(?:@(?P<split>[\w.-]+))?")
_DATA_SUFFIXES = (".jsonl", ".parquet", ".json")
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def hub_name(place: str) -> tuple[str, str] | None:
    """Name and split of `owner/name[@split]` or `hf:NAME[@split]`; None when `place` is neither."""
    found = _HUB.fullmatch(place)
    return (found["any"] or found["name"], found["split"] or "") if found else None


def read_rows(place: str) -> Iterator[Row]:
    """The rows of a file, a folder or a hub data set. ConfigError, `SourceUnavailable` when the hub is out of reach."""
    path = Path(place)
    if path.is_dir():
        yield from _folder(path)
    elif path.is_file():
        for number, fields in enumerate(_file(path), 1):
            yield _row(fields, f"{path}: row {number}", path.parent)
    elif (hub := hub_name(place)) is not None:
        for number, fields in enumerate(_hub(*hub), 1):
            yield _row(fields, f"{hub[0]}: row {number}", Path.cwd())


def read_selection(path: Path) -> tuple[str, tuple[str, ...]] | None:
    """A file that chooses tasks of another set, `{"tasks": a set's name or place, "ids": [...]}`; None for another.

    Further keys are remarks. ConfigError when it is broken.
    """
    if path.suffix.lower() not in (".json", ".yaml", ".yml") or not path.is_file():
        return None
    content = _parsed(path)
    if not isinstance(content, Mapping) or "ids" not in content:
        return None
    return text(content.get("tasks"), f"{path}: tasks"), texts(content["ids"], f"{path}: ids")


def _row(fields: object, where: str, base: Path) -> Row:
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where}: must be a mapping of fields, not {type(fields).__name__}")
    return Row(fields, where, base)


def _file(path: Path) -> Iterator[object]:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            yield from _json_lines(path)
        case ".parquet":
            yield from _parquet(path)
        case _:
            rows = _parsed(path)
            if not isinstance(rows, list):
                raise ConfigError(f"{path}: must be a list of task rows, or a mapping with `tasks` and `ids`")
            yield from rows


def _parsed(path: Path) -> object:
    try:
        content = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text in UTF-8: {error}") from error
    return parse_json(content, str(path)) if path.suffix.lower() == ".json" else parse_yaml(content, str(path))


def _json_lines(path: Path) -> Iterator[object]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield parse_json(line, f"{path}: line {number}")


def _parquet(path: Path) -> Iterator[object]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ConfigError(f"{path}: parquet files need pyarrow: pip install 'skyenv[datasets]'") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ConfigError(f"{path}: not a readable parquet file: {error}") from error


def _hub(name: str, split: str) -> Iterator[object]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"tasks: {name!r} comes from the hub: pip install 'skyenv[datasets]'") from error
    try:
        splits = datasets.load_dataset(name) if not split else {split: datasets.load_dataset(name, split=split)}
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"tasks: {name!r}: no such data set or split: {error}") from error
    except OSError as error:
        raise SourceUnavailable(f"{name} cannot be fetched from the hub: {error}") from error
    if len(splits) != 1:
        raise ConfigError(f"tasks: {name!r} has the splits {', '.join(splits)}; choose one with {name}@SPLIT")
    yield from next(iter(splits.values()))


def _folder(path: Path) -> Iterator[Row]:
    if (path / "sweb.yaml").is_file():
        for file in sorted(path.glob("tasks/*/task.yaml")):
            yield _row(_swebench_folder(file), str(file), file.parent)
        return
    folders = [path] if _is_task(path) else [folder for folder in sorted(path.iterdir()) if _is_task(folder)]
    if folders:
        yield from map(_task_folder, folders)
        return
    files = [file for suffix in _DATA_SUFFIXES for file in sorted(path.rglob(f"*{suffix}"))]
    files = [file for file in files if not file.name.startswith(".") and not file.name.endswith(".records.jsonl")]
    if not files:
        raise ConfigError(f"tasks: no folder of {path} holds a task.yaml or task.toml, and no data file is below it")
    for file in files:
        yield from read_rows(str(file))


def _is_task(folder: Path) -> bool:
    return (folder / "task.yaml").is_file() or (folder / "task.toml").is_file()


def _task_folder(folder: Path) -> Row:
    """A folder of a task: Harbor's has a task.toml, terminal-bench's a run-tests.sh, skyenv's a row in task.yaml."""
    if (folder / "task.toml").is_file():
        return Row({HARBOR: str(folder), "instance_id": folder.name}, str(folder / "task.toml"), folder)
    file = folder / "task.yaml"
    fields = parse_yaml(file.read_bytes().decode("utf-8"), str(file))
    row = _row(fields, str(file), folder)
    if "instruction" in row.fields:
        return Row({**row.fields, TERMINAL_BENCH: str(folder), "instance_id": folder.name}, str(file), folder)
    return row


def _swebench_folder(file: Path) -> object:
    """A task of a SWE-bench task repository as the row that it stands for."""
    fields = parse_yaml(file.read_bytes().decode("utf-8"), str(file))
    if not isinstance(fields, Mapping):
        return fields
    row: dict[str, Any] = {"instance_id": file.parent.name, **fields}
    tests = file.parent / "tests.json"
    if tests.is_file():
        found = parse_json(tests.read_bytes(), str(tests))
        row |= found if isinstance(found, dict) else {}
    parts = {
        "problem_statement": "problem_statement.md", "patch": "gold.patch", "test_patch": "test.patch",
        "eval_script": "eval.sh", "hints_text": "hints.md",
    }  # fmt: skip
    for name, part in parts.items():
        if name not in row and (file.parent / part).is_file():
            row[name] = (file.parent / part).read_bytes().decode("utf-8", "surrogateescape")
    return row


def parse_json(content: str | bytes, where: str) -> object:
    """Parse JSON. ConfigError saying where."""
    try:
        value: object = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    return value


def parse_yaml(content: str, where: str) -> object:
    """Parse YAML. ConfigError saying where."""
    try:
        value: object = yaml.load(content, Loader=_SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    return value
