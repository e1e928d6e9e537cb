"""How fast the embedded engine batches, beside transformers' own continuous batching and batches that nobody joins.

Loads: `together`, all requests at once; `trickle`, one by one with exponential gaps; `turns`, sessions that ask
again a while after each answer, as trajectories with tools do. The three engines run the same loads in turn, each after
a warm-up, `--rounds` times in an order that rotates. Least, median and most over the rounds: tokens a second, median
seconds of a request, and the ratios of each round, ours to each of the others; above 1 ours is the faster one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from sky_trainer import tiny
from sky_trainer.engines import HFEngine
from skyenv.types import SamplingParams

Ask = Callable[[Sequence[int], int], Awaitable[int]]
OURS = "joining"
LOADS = ("together", "trickle", "turns")
TEXTS = ["look around the house", "go north, then go south", "take the key and open the door"] * 8


class Joinless(HFEngine):
    """The embedded engine as batches that are filled once and decoded to their longest answer."""

    def _arrivals(self) -> list[Any]:
        return super()._arrivals() if not self._batch.rows else []


@asynccontextmanager
async def embedded(kind: type[HFEngine], model: Any, tokenizer: Any) -> Any:
    """Our engine; asks for so many ids and tells how many came."""
    async with kind(model, tokenizer.decode, []) as engine:

        async def ask(prompt: Sequence[int], tokens: int) -> int:
            return len((await engine.generate(prompt, SamplingParams(max_tokens=tokens))).token_ids)

        yield ask


@asynccontextmanager
async def transformers_batching(model: Any, tokenizer: Any) -> Any:
    """The batching that comes with transformers, its manager kept up between requests."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=tokenizer.pad_token_id
    )
    sizes = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=1024, return_logprobs=True)
    arrived: dict[str, anyio.Event] = {}
    answers: dict[str, Any] = {}
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes, block=True, timeout=10
    ) as manager:

        async def collect() -> None:
            while True:
                result = await anyio.to_thread.run_sync(lambda: manager.get_result(timeout=0.05))
                if manager.background_thread_status.fatal_error is not None:
                    raise manager.background_thread_status.fatal_error
                if result is not None and result.is_finished():
                    answers[result.request_id] = result
                    arrived[result.request_id].set()

        async def ask(prompt: Sequence[int], tokens: int) -> int:
            name = f"r{len(arrived)}"
            arrived[name] = anyio.Event()
            manager.add_request(list(prompt), request_id=name, max_new_tokens=tokens)
            await arrived[name].wait()
            return len(answers[name].generated_tokens)

        async with anyio.create_task_group() as group:
            group.start_soon(collect)
            yield ask
            group.cancel_scope.cancel()


async def load(name: str, ask: Ask, seed: int, requests: int) -> tuple[float, list[float]]:
    """Run one load: tokens a second, and the seconds that each request took."""
    chance, seconds, tokens = random.Random(seed), [], 0
    plans = [(chance.randrange(20, 120), chance.choice((16, 32, 64, 128))) for _ in range(requests)]
    gaps = [chance.expovariate(1 / 0.02) for _ in range(requests)]

    async def one(length: int, budget: int) -> None:
        nonlocal tokens
        began = time.perf_counter()
        tokens += await ask([20 + (7 * place) % 200 for place in range(length)], budget)
        seconds.append(time.perf_counter() - began)

    async def session(turns: list[tuple[int, int]], pauses: list[float]) -> None:
        for (length, budget), pause in zip(turns, pauses, strict=True):
            await one(length, budget)
            await anyio.sleep(4 * pause)

    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        if name == "turns":
            for place in range(0, requests, 4):
                group.start_soon(session, plans[place : place + 4], gaps[place : place + 4])
        else:
            for plan, gap in zip(plans, gaps, strict=True):
                group.start_soon(one, *plan)
                await anyio.sleep(gap if name == "trickle" else 0)
    return tokens / (time.perf_counter() - began), seconds


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All engines under all loads."""
    import torch

    torch.set_num_threads(1)
    tokenizer = tiny.make_tokenizer(TEXTS, 320)
    model = tiny.make_model(tokenizer, hidden=arguments.hidden, layers=arguments.layers, seed=0).eval()
    engines: dict[str, Callable[[], Any]] = {
        OURS: lambda: embedded(HFEngine, model, tokenizer),
        "joinless": lambda: embedded(Joinless, model, tokenizer),
        "transformers": lambda: transformers_batching(model, tokenizer),
    }
    speeds: dict[tuple[str, str], list[float]] = {}
    waits: dict[tuple[str, str], list[float]] = {}
    names = list(engines)
    for number in range(arguments.rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            async with engines[name]() as ask:
                await load("together", ask, 99, 4)
                for kind in LOADS:
                    speed, seconds = await load(kind, ask, number, arguments.requests)
                    speeds.setdefault((kind, name), []).append(speed)
                    waits.setdefault((kind, name), []).append(statistics.median(seconds))
    return {
        kind: {
            **{
                name: {"tokens_per_second": spread(speeds[kind, name]), "median_seconds": spread(waits[kind, name])}
                for name in names
            },
            **{
                f"vs_{name}": {
                    "tokens_per_second": spread(ratios(speeds[kind, OURS], speeds[kind, name])),
                    "median_seconds": spread(ratios(waits[kind, name], waits[kind, OURS])),
                }
                for name in names
                if name != OURS
            },
        }
        for kind in LOADS
    }


def ratios(more: Sequence[float], less: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(more, less, strict=True)]


def spread(values: Sequence[float]) -> list[float]:
    """Smallest, median, largest."""
    return [round(value, 3) for value in (min(values), statistics.median(values), max(values))]


def main() -> None:
    """Print a table, with `--json` one JSON object behind it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = anyio.run(measure, arguments)
    for kind, rows in result.items():
        print(f"{kind}: tokens a second (least, median, most); median seconds of a request")
        for name, row in rows.items():
            print(f"  {name:16} {row['tokens_per_second']!s:30} {row['median_seconds']!s}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
