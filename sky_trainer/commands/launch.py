"""`sky_trainer launch CONFIG.yaml --ray ADDRESS [--key value ...]`: a training run over the machines of a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from sky_trainer import config as configuration
from sky_trainer.commands.train import add_dry_run, check, report
from skyenv.errors import ConfigError

EPILOG = """\
Roles and what each gets stand below ray in the configuration, servers below launch; any key can be given on the
command line as to train. Without a cluster, `sky_trainer train` starts the servers itself; docs/launching.md has all
ways, several machines without Ray and manifests among them.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "launch",
        help="train over the machines of a Ray cluster",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="see recipes/ for examples")
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        default="auto",
        help="of the cluster's head, HOST:PORT (default: RAY_ADDRESS, or the cluster on this machine)",
    )
    add_dry_run(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train on the cluster, then say what came of it."""
    config = configuration.load(arguments.config, arguments.overrides)
    from sky_trainer.cluster import launch_on_ray, machines_of

    if arguments.dry_run:
        return check(config, arguments.assume_gpu, arguments.json, lambda: machines_of(arguments.ray))
    if arguments.assume_gpu is not None:
        raise ConfigError("--assume-gpu goes with --dry-run; training takes the GPUs that are there")
    from sky_trainer.run import Outcome

    outcome = Outcome(**launch_on_ray(config, arguments.ray))
    report(outcome, config, arguments.json)
    return 0
