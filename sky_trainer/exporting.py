"""A run's policy as one whole model that transformers and inference servers load without anything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sky_trainer.files import appearing
from sky_trainer.identity import CONFIG
from sky_trainer.in_loop import BEST
from sky_trainer.models import load_model, load_tokenizer
from sky_trainer.run import FINAL
from skyenv.errors import ConfigError

ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: from where, its parameters and their type, and whether an adapter was merged into it."""

    source: Path
    parameters: int
    dtype: str
    merged: bool


def find_policy(run: Path, *, best: bool = False, step: int | None = None) -> Path:
    """The directory of a run's last, best or an earlier policy; `run` may be such a directory itself.

    ConfigError names what there is.
    """
    if not (run / CONFIG).is_file() and (run / "config.json").is_file() | (run / ADAPTER).is_file():
        if best or step is not None:
            raise ConfigError(f"{run} is a policy and no run; leave --best and --step out")
        return run
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is no directory of a run, and no model or adapter lies there")
    name = BEST if best else f"checkpoint-{step}" if step is not None else FINAL
    if not (run / name).is_dir():
        there = sorted(path.name for path in run.iterdir() if path.name in (BEST, FINAL))
        there += sorted((path.name for path in run.glob("checkpoint-*")), key=lambda each: int(each.rpartition("-")[2]))
        raise ConfigError(f"{run} has no {name}; it has {', '.join(there) or 'no policy yet'}")
    return run / name


def export(source: Path, out: Path, *, base: str = "", dtype: str = "auto") -> Exported:
    """Write the policy at `source` to the new directory `out`, an adapter merged into the model that it is for.

    `base` is that model's place where it is no longer where it was; `dtype` auto keeps the type it has there. The
    directory appears whole or not at all. ConfigError for what the user can change.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already; name a new directory")
    merged = (source / ADAPTER).is_file()
    if base and not merged:
        raise ConfigError(f"--base is for adapters, and {source} holds a whole model; leave it out")
    model, tokenizer = load_model(str(source), dtype, base), load_tokenizer(str(source))
    try:
        with appearing(out) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror or error}") from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Exported(source, parameters, str(model.dtype).removeprefix("torch."), merged)
