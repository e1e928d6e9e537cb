"""How long an update takes from the trainer's memory to a server that samples from it: written, taken, compared.

python benchmarks/weights.py                                     # served engines of our own, two sizes
python benchmarks/weights.py --kind vllm --url URL --model DIR   # a running server and the checkpoint it serves
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import torch
from anyio.from_thread import start_blocking_portal

from sky_trainer import tiny
from sky_trainer.models import load_model, load_tokenizer
from sky_trainer.opening import make_delivery, opened_servers
from sky_trainer.rollouts import opened
from sky_trainer.sections.engine import EngineConfig
from sky_trainer.sync.probe import TEXT, Probe
from sky_trainer.sync.servers import ServerWeights, SyncReport

SIZES = {"0.5M": (128, 2), "26M": (512, 8)}


def rounds(config: EngineConfig, model_path: str, folder: Path, count: int) -> list[SyncReport]:
    """Push `count` versions, a change of every weight between two."""
    model, found = load_model(model_path), []
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        pool, servers = stack.enter_context(opened(portal, opened_servers(config)))
        probe = Probe(model, load_tokenizer(model_path).encode(TEXT), 1.0)
        weights = ServerWeights(portal, pool, servers, make_delivery(config, folder, model), probe=probe)
        for version in range(count):
            weights.push(version)
            assert weights.last is not None
            found.append(weights.last)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
    return found


@contextmanager
def served(folder: Path, hidden: int, layers: int) -> Iterator[tuple[str, str]]:
    """A served engine over a new model; its URL and the model's directory."""
    tokenizer = tiny.make_tokenizer([TEXT] * 3, 300)
    model = tiny.make_model(tokenizer, hidden, layers, seed=0)
    path = folder / f"model-{hidden}-{layers}"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    command = [sys.executable, "-m", "sky_trainer.cli", "serve-engine", str(path), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1], str(path)
        finally:
            process.terminate()


def report(name: str, found: list[SyncReport]) -> dict[str, object]:
    """Medians over all but the first push."""
    later = found[1:] or found
    row = {
        "what": name,
        "rounds": len(later),
        "write_seconds": round(median(r.prepare_seconds for r in later), 3),
        "take_seconds": round(median(r.give_seconds for r in later), 3),
        "compare_seconds": round(median(r.check_seconds for r in later), 3),
        "slowest_seconds": round(max(r.seconds for r in later), 3),
        "largest_gap_nats": max(r.gap or 0.0 for r in found),
    }
    print(json.dumps(row))
    return row


def main() -> None:
    """Print one JSON object a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("vllm", "sglang"), default="sglang")
    parser.add_argument("--url", help="a running server (default: served engines of our own)")
    parser.add_argument("--model", help="directory of the checkpoint that it serves")
    parser.add_argument("--sync", default="disk", choices=("disk", "nccl", "gloo"))
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.url:
            config = EngineConfig(kind=arguments.kind, urls=(arguments.url,), sync=arguments.sync)
            report(f"{arguments.kind} {arguments.sync}", rounds(config, arguments.model, folder, arguments.rounds))
            return
        for size, (hidden, layers) in SIZES.items():
            with served(folder, hidden, layers) as (url, path):
                config = EngineConfig(kind="sglang", urls=(url,))
                report(f"served {size} disk", rounds(config, path, folder / size, arguments.rounds))


if __name__ == "__main__":
    main()
