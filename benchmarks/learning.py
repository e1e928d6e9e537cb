"""Whether a policy learns, and what it takes: the demo's job in variants, over seeds, from one warm start a seed.

Every variant is a command line of `sky_trainer train`; all variants of a seed start from the same supervised policy.
Counted is the share of rollouts that solve their task, in the first and the last quarter of the steps; a run learned
when the last is higher by 0.2. Variants that must learn: those of `PATHS`, other ways to the same update. `ABLATIONS`
change the update itself and say what a part is worth.

Two of the paths have learning rates of their own. With rollouts one step old the recipe's 6e-4 is too fast (`stale_1`).
And in this model, which was random before 240 supervised steps, the head carries what is learned: adapters on the
linear modules below it do not learn within these steps (`adapters_alone`), and neither do those modules trained in
full; `lora` trains the head whole beside its adapters.

A run that is complete is not made again, so the script can be stopped and called again, and `--only` and `--seeds` may
share the work between machines with one `--out`.

    benchmarks/learning.py --list
    nice -n 19 benchmarks/learning.py --only sync,lora --seeds 0,1,2 --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _learning import Curve, draw
from _measure import report

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "demo.yaml"
STEPS, KILL_AT = 24, 9
JOB = ("--steps", str(STEPS), "--save_every", "4", "--tasks.limit", "4", "--rollout.groups_per_step", "4")
JOB = (*JOB, "--micro_batch", "12", "--warm_start.steps", "240")
TRAIN = (sys.executable, "-m", "sky_trainer.cli", "train", str(RECIPE), *JOB)
LEARNED = 0.2
DEADLINE = 7200.0


@dataclass(frozen=True, slots=True)
class Variant:
    """Overrides of the configuration, and how the run is started: ranks, killed half way, an engine of its own."""

    overrides: tuple[str, ...] = ()
    ranks: int = 1
    killed: bool = False
    served: bool = False


ADAPTERS = ("--lora.rank", "16", "--lora.alpha", "32")
PATHS = {
    "sync": Variant(),
    "staleness_1": Variant(("--staleness", "1", "--grpo.learning_rate", "4e-4")),
    "lora": Variant((*ADAPTERS, "--lora.whole", "lm_head", "--grpo.learning_rate", "1e-3")),
    "two_ranks": Variant(ranks=2),
    "resumed": Variant(killed=True),
    "disk": Variant(("--engine.kind", "sglang", "--engine.sync", "disk"), served=True),
}
ABLATIONS = {
    "stale_1": Variant(("--staleness", "1")),
    "stale_4": Variant(("--staleness", "4")),
    "adapters_alone": Variant((*ADAPTERS, "--grpo.learning_rate", "4e-3")),
    "mask_off": Variant(("--filter.unmask", "true")),
    "kl": Variant(("--grpo.beta", "0.02")),
    "milestones": Variant(("--env.options.reward", "milestones")),
    "row_a_turn": Variant(("--rollout.rows", "turn")),
    "leave_one_out": Variant(("--advantage.baseline", "leave_one_out")),
}
VARIANTS = {**PATHS, **ABLATIONS}


def main() -> None:
    """Make what is missing of the runs that were asked for, then read all of them."""
    options = parsed()
    if options.list:
        for name, variant in VARIANTS.items():
            print(f"{name:16} {' '.join(variant.overrides)}{'  2 ranks' if variant.ranks > 1 else ''}")
        return
    for seed in options.seeds:
        for name in options.only:
            make(options.out, name, seed)
    curves = {name: [c for s in options.seeds if (c := read(options.out / f"{name}-{s}"))] for name in VARIANTS}
    curves = {name: found for name, found in curves.items() if found}
    if options.plot and curves:
        panels = [[name for name in part if name in curves] for part in (PATHS, {"sync": None, **ABLATIONS})]
        draw(options.plot, curves, [panel for panel in panels if panel])
    report({name: summary(found) for name, found in curves.items()}, options.json)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="learning curves of the demo's job in variants")
    words = lambda text: [word for word in text.split(",") if word]  # noqa: E731
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="directory of all runs")
    parser.add_argument("--only", type=words, default=list(VARIANTS), help="variants, separated by commas")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in words(text)], default=[0, 1, 2])
    parser.add_argument("--plot", type=Path, help="draw what there is to this .svg or .png")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--list", action="store_true", help="print the variants")
    options = parser.parse_args()
    for name in options.only:
        if name not in VARIANTS:
            parser.error(f"--only: no variant {name!r}; there are {', '.join(VARIANTS)}")
    return options


def make(out: Path, name: str, seed: int) -> None:
    """One run, unless it is there."""
    run, variant = out / f"{name}-{seed}", VARIANTS[name]
    if read(run) is not None:
        return
    start = warm_start(out, seed)
    words = ["--out", str(run), "--seed", str(seed), "--model.path", str(start), "--warm_start.steps", "0"]
    words += variant.overrides
    started = time.monotonic()
    with served(start, out / f"{name}-{seed}.engine.log") if variant.served else contextlib.nullcontext() as url:
        if url:
            words += ["--engine.urls", url]
        if variant.killed:
            kill_half_way(words, run)
        play(words, run, variant.ranks)
    (run / "wall.json").write_text(json.dumps({"seconds": time.monotonic() - started}))
    print(f"{name} seed {seed}: {time.monotonic() - started:.0f} s", flush=True)


def warm_start(out: Path, seed: int) -> Path:
    """The supervised policy of a seed: what a run of one step began with."""
    run = out / f"warm-{seed}"
    policy = run / "warm_start"
    if not (policy / ".complete").is_file():
        shutil.rmtree(run, ignore_errors=True)
        play(["--out", str(run), "--seed", str(seed), "--steps", "1"], run, 1)
    return policy


def command(words: Sequence[str], ranks: int) -> list[str]:
    """The command line of a run, under torchrun where there are ranks."""
    if ranks == 1:
        return [*TRAIN, *words]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, *TRAIN[1:], *words]


def play(words: Sequence[str], run: Path, ranks: int) -> None:
    """Run to the end; what it prints goes to a file beside its directory. SystemExit with its end on failure."""
    log = run.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink, process(command(words, ranks), sink) as running:
        if running.wait(DEADLINE):
            raise SystemExit(f"{run.name} failed:\n{log.read_text(errors='replace')[-2000:]}")


def kill_half_way(words: Sequence[str], run: Path) -> None:
    """Start a run and kill it with SIGKILL once it has taken some steps; nothing when it was killed before."""
    if (run / "killed").exists():
        return
    with run.with_suffix(".log").open("ab") as sink, process(command(words, 1), sink) as running:
        deadline = time.monotonic() + DEADLINE
        while len(rows_of(run)) < KILL_AT and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        if running.poll() is not None or time.monotonic() >= deadline:
            raise SystemExit(f"{run.name} ended before it could be killed, see {run.with_suffix('.log')}")
        os.killpg(running.pid, signal.SIGKILL)
        running.wait(60)
    (run / "killed").touch()


@contextlib.contextmanager
def process(words: Sequence[str], sink: Any, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process in a group of its own, which is gone afterwards with all of its children."""
    running = subprocess.Popen(words, stderr=sink, start_new_session=True, cwd=ROOT, **{"stdout": sink, **options})
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGTERM if running.poll() is None else signal.SIGKILL)
        running.wait(60)


@contextlib.contextmanager
def served(policy: Path, log: Path) -> Iterator[str]:
    """An engine in a process of its own; yields its URL."""
    words = [sys.executable, "-m", "sky_trainer.cli", "serve-engine", str(policy), "--port", "0", "--threads", "1"]
    with log.open("ab") as sink, process(words, sink, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        line = running.stdout.readline().decode().strip()
        if "http" not in line:
            raise SystemExit(f"the engine did not start, see {log}")
        yield line.split()[-1]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run by step; a line that a kill cut short is no row."""
    found = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            found[row["step"]] = row
    return [found[step] for step in sorted(found)]


def read(run: Path) -> Curve | None:
    """A complete run's shares of solved rollouts by step, or None."""
    rows, wall = rows_of(run), run / "wall.json"
    if len(rows) < STEPS or not wall.exists():
        return None
    return Curve([row["rollout/resolved"] for row in rows], json.loads(wall.read_text())["seconds"])


def summary(curves: Sequence[Curve]) -> dict[str, float]:
    """Of a variant: seeds, how many learned, means of the quarters, their spread, wall seconds."""
    firsts, lasts = [curve.first for curve in curves], [curve.last for curve in curves]
    return {
        "seeds": len(curves),
        "learned": sum(last - first >= LEARNED for first, last in zip(firsts, lasts, strict=True)),
        "first": statistics.fmean(firsts),
        "last": statistics.fmean(lasts),
        "last_min": min(lasts),
        "last_max": max(lasts),
        "seconds": statistics.fmean(curve.seconds for curve in curves),
    }


if __name__ == "__main__":
    main()
