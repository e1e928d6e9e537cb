"""Which run a directory holds: the configuration in it, and what of that a resumed run may be given anew.

What counts is what a value means: a path is the file that it names, from wherever and however it is spelled, and a
number is a number, also where YAML reads it as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sky_trainer import config as configuration
from sky_trainer.config import Config, to_mapping
from sky_trainer.files import PARTIAL
from sky_trainer.paths import over_paths, whole
from sky_trainer.record import METRICS, TRANSCRIPTS, last_checkpoint, read_metrics
from sky_trainer.settings import as_float, read_yaml
from sky_trainer.starting import DONE, WARM
from skyenv.errors import ConfigError

CONFIG = "config.yaml"
MAY_CHANGE = (
    *("out", "steps", "save_every", "resume", "staleness", "cpu_threads", "rank_timeout", "sized_for"),
    *("evaluation.", "engine.", "launch.", "ray.", "sandbox.", "metrics."),
    *("rollout.concurrency", "rollout.init_concurrency", "rollout.eval_concurrency"),
    *("rollout.grade_ahead", "rollout.longest_first", "rollout.deadlines"),
    *("grpo.use_cpu", "grpo.report_to", "grpo.run_name", "grpo.save_total_limit", "grpo.gradient_checkpointing"),
    *("grpo.log_", "grpo.logging_", "grpo.dataloader_", "grpo.ddp_"),
)
"""What a resumed run may be given anew: how it runs, not what it trains."""
_FROM = re.compile(r"# paths are named from (.+)\n")


def prepare_directory(config: Config) -> None:
    """Make the run directory, or check that it holds this very run. ConfigError otherwise."""
    path = config.run_dir / CONFIG
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(file.suffix != PARTIAL for file in config.run_dir.iterdir()):
                raise ConfigError(f"out: {config.run_dir} holds other files; choose an empty or new directory")
            _write(config, path)
    except OSError as error:
        raise ConfigError(f"out: cannot write to {config.run_dir}: {error.strerror}") from error
    if not config.resume and read_metrics(config.run_dir):
        raise ConfigError(f"out: {config.run_dir} holds a run already; choose another or leave resume at true")
    changes = changed(path, config) if _begun(config.run_dir) else {}
    if changes:
        told = "; ".join(f"{key} was {before!r} and is {now!r} now" for key, (before, now) in changes.items())
        raise ConfigError(
            f"out: {config.run_dir} holds a run with another {', '.join(changes)}: {told}; write what it was, or choose"
            " another directory"
        )
    _write(config, path)


def _write(config: Config, path: Path) -> None:
    configuration.write(config, path, f"# paths are named from {Path.cwd()}\n")


def _begun(run_dir: Path) -> bool:
    """Whether something was made by the configuration there; else a wrong one may be put right in place."""
    made = [run_dir / name for name in (TRANSCRIPTS, METRICS, f"{WARM}/{DONE}")]
    return any(path.is_file() and (path.name == DONE or path.stat().st_size) for path in made) or bool(
        last_checkpoint(run_dir)
    )


def changed(path: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """What a run has not in common with the one whose configuration was written to `path`: key -> (there, here)."""
    there, here = configuration.from_mapping(read_yaml(path)), config
    found = _FROM.match(path.read_text(encoding="utf-8"))
    base = Path(found[1]) if found else Path.cwd()
    before, now = dict(_leaves(to_mapping(there))), dict(_leaves(to_mapping(here)))
    before_whole = dict(_leaves(over_paths(to_mapping(there), whole(base))))
    now_whole = dict(_leaves(over_paths(to_mapping(here), whole(Path.cwd()))))
    return {
        key: (before.get(key), now.get(key))
        for key in dict.fromkeys([*before, *now])
        if not key.startswith(MAY_CHANGE)
        and not _same(before.get(key), now.get(key))
        and not _same(before_whole.get(key), now_whole.get(key))
    }


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{key}[{place}]")
    else:
        yield key, value


def _same(left: Any, right: Any) -> bool:
    number = as_float(left)
    return bool(left == right) or (number is not None and number == as_float(right))
