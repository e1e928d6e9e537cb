"""`sky_trainer doctor`: what this machine can do, and what to do about each missing part."""

from __future__ import annotations

import argparse
from pathlib import Path

from sky_trainer.checks import run_checks
from sky_trainer.commands.output import print_json, print_line


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="what this machine can do, and what to change where a part is missing")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--engine",
        type=Path,
        action="append",
        metavar="DIR",
        help="environment of vLLM or SGLang to look at, any number of times (default: those in .engines)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Status 1 when something is missing without which nothing runs."""
    engines = arguments.engine or sorted(path.parents[1] for path in Path(".engines").glob("*/bin/python"))
    checks = run_checks(engines=engines)
    for check in checks:
        mark = "ok  " if check.ok else ("FAIL" if check.required else "-   ")
        print_line(f"{mark} {check.name:14} {check.detail}")
        for advice in check.advice:
            print_line(f"                    -> {advice}")
    broken = [check.name for check in checks if check.required and not check.ok]
    print_line("ready" if not broken else f"not ready: {', '.join(broken)}")
    if arguments.json:
        print_json({"ok": not broken, "checks": [check.to_json() for check in checks]})
    return 1 if broken else 0
