"""`sky_trainer timeline`: draw the stages of a run's trajectories over time, the engine's busy share below."""

from __future__ import annotations

import argparse
from pathlib import Path

from sky_trainer.commands.output import print_line
from sky_trainer.metering import TIMELINE
from skyenv.errors import ConfigError
from skyenv.vector.timeline import read_timeline


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("timeline", help="draw the stages of a run's trajectories over time")
    parser.add_argument("path", type=Path, metavar="RUN", help="a run's directory, or a timeline.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the picture: FILE.svg, FILE.png or FILE.pdf")
    parser.add_argument("--limit", type=int, default=64, help="draw so many trajectories (default 64, the first)")
    parser.add_argument("--skip", type=int, default=0, help="leave so many out before them (default 0)")
    parser.add_argument("--slots", type=int, help="requests the engines serve at once (default: the most seen)")
    parser.add_argument("--title", default="", help="a title of your own")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw."""
    from sky_trainer.drawing import draw_timeline

    for name, least in (("limit", 1), ("skip", 0), ("slots", 1)):
        value = vars(arguments)[name]
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: must be at least {least}")
    path: Path = arguments.path
    lines = sorted(read_timeline(path / TIMELINE if path.is_dir() else path), key=lambda line: line.start)
    shown = lines[arguments.skip :][: arguments.limit]
    if not shown:
        raise ConfigError(f"--skip {arguments.skip}: there are only {len(lines)} trajectories")
    others = [*lines[: arguments.skip], *lines[arguments.skip + arguments.limit :]]
    draw_timeline(shown, arguments.out, beside=others, slots=arguments.slots, title=arguments.title)
    print_line(f"{len(shown)} of {len(lines)} trajectories drawn to {arguments.out}")
    return 0
