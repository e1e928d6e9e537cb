"""`sky_trainer sft CONFIG.yaml --sft.data FILE`: supervised training that `train` goes on from."""

from __future__ import annotations

import argparse
from pathlib import Path

from sky_trainer import config as configuration
from sky_trainer.commands.interrupts import deferred_interrupt
from sky_trainer.commands.output import print_json, print_line

EPILOG = """\
The configuration is that of `train`; of it count model, rollout (format, history, template_options), env, out, seed,
micro_batch, save_every, resume and the sections lora and sft. Demonstrations are trajectory stores of `rollout`,
`eval` and `train`, exported rows, and transcripts with `messages`. Then reinforcement learning goes on:

  sky_trainer sft recipes/X.yaml --out runs/sft --sft.data expert.jsonl --sft.resolved true
  sky_trainer train recipes/X.yaml --out runs/rl --model.path runs/sft/final

"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "sft",
        help="supervised training on trajectories or transcripts",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="see recipes/ for examples")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, then say where the model is."""
    config = configuration.load(arguments.config, arguments.overrides)
    with deferred_interrupt():
        import sky_trainer.sft  # noqa: F401  # the slow import, while an interrupt cannot be lost
        from sky_trainer.supervised import teach
    taught = teach(config, print_line)
    loss = "nothing left to do" if taught.loss is None else f"last loss {taught.loss:.4f}"
    print_line(f"{taught.steps} steps, {loss}, {taught.seconds:.0f} s; go on with --model.path {taught.model}")
    if arguments.json:
        print_json(
            {
                "model": str(taught.model),
                "steps": taught.steps,
                "loss": taught.loss,
                "taken": dict(taught.lessons.taken),
                "left_out": dict(taught.lessons.left_out),
                "rows": len(taught.lessons.segments),
            }
        )
    return 0
