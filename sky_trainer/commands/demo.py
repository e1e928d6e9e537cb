"""`sky_trainer demo`: a tiny model learns to fix bugs, on a CPU, in minutes. The recipe is recipes/demo.yaml."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import sky_trainer
from sky_trainer import config as configuration
from sky_trainer.commands import train
from skyenv.errors import ConfigError

RUNS = Path("runs")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("demo", help="watch a tiny model learn to fix bugs: CPU only, nothing to set up")
    parser.add_argument("--seed", type=int, default=0, help="of model, demonstrations and sampling (default 0)")
    parser.add_argument("--steps", type=int, help="optimizer steps of GRPO (default: as the recipe says)")
    parser.add_argument(
        "--out", type=Path, help="run directory, resumed if it holds a run (default: a new one in runs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the recipe, then say what came of it."""
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: must be at least 1")
    config = configuration.load(recipe("demo"))
    config = dataclasses.replace(
        config,
        seed=arguments.seed,
        steps=arguments.steps or config.steps,
        out=str(arguments.out or new_directory(f"demo-seed{arguments.seed}")),
    )
    train.report(train.train(config, f"demo, seed {arguments.seed}"), config, arguments.json)
    return 0


def recipe(name: str) -> Path:
    """A recipe that ships with the project: in the package, or beside it in a checkout."""
    package = Path(sky_trainer.__file__).parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise ConfigError(f"the recipe {name}.yaml is missing from this installation")


def new_directory(name: str) -> Path:
    """The first of runs/name, runs/name-2, ... that does not exist."""
    number = 1
    while (path := RUNS / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path
