"""The file of an evaluation: a transcript a line, marked with what was evaluated, from which it goes on after a crash.

Several evaluations may share a file; each reads only the lines that carry its own mark. A sample that infrastructure
spoiled is run again; a line cut short by a crash is a sample that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from skyenv.errors import ConfigError
from skyenv.trajectory_io import append_trajectories, read_records
from skyenv.types import Trajectory

MARK = "evaluation"


def append_sample(path: Path, trajectory: Trajectory, mark: str) -> None:
    """Add one transcript. ConfigError when the disk refuses."""
    try:
        append_trajectories(path, [trajectory], **{MARK: mark})
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from error


def read_samples(path: Path, mark: str | None = None) -> list[Trajectory]:
    """The samples in a file, of one evaluation if `mark` is given; later ones replace failed earlier ones.

    ConfigError when the file cannot be read.
    """
    found: dict[tuple[str, str, int], Trajectory] = {}
    for record, trajectory in read_records(path):
        line_mark = str(record.get(MARK, ""))
        key = (line_mark, trajectory.task_id, trajectory.sample_index)
        if (mark is None or line_mark == mark) and (key not in found or found[key].failure is not None):
            found[key] = trajectory
    return list(found.values())


def write_predictions(path: Path, trajectories: Sequence[Trajectory], model: str) -> list[Path]:
    """Write patches as SWE-bench takes them, `{"instance_id", "model_name_or_path", "model_patch"}` a line.

    A file holds one sample of each task, as its evaluation expects: `path` the first, `name.sampleN.jsonl` the
    others. Returns the files. ConfigError when the disk refuses.
    """
    samples = sorted({trajectory.sample_index for trajectory in trajectories})
    files = []
    for sample in samples:
        target = path if sample == samples[0] else path.with_name(f"{path.stem}.sample{sample}{path.suffix}")
        rows = [
            {"instance_id": t.task_id, "model_name_or_path": model, "model_patch": t.verdict.get("patch", "")}
            for t in trajectories
            if t.sample_index == sample and t.failure is None
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(f"--predictions {target}: {error.strerror}") from error
        files.append(target)
    return files
