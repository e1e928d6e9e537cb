"""`sky_trainer serve-engine MODEL`: a policy behind HTTP, for training against a process of its own on any machine."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from sky_trainer.commands.output import print_line
from skyenv.errors import ConfigError

if TYPE_CHECKING:
    from skyenv.remote.listen import Listening

TOKEN = "OPENAI_API_KEY"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve-engine", help="serve a model for rollouts by transformers, where vLLM and SGLang do not run"
    )
    parser.add_argument(
        "model", metavar="MODEL", help="directory or hub name of a causal language model with its tokenizer"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for any free one (default 8000)")
    parser.add_argument("--dtype", default="float32", help="precision of the weights (default float32)")
    parser.add_argument("--max-batch", type=int, default=64, help="requests that are decoded together (default 64)")
    parser.add_argument("--threads", type=int, default=0, help="of torch (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, where a request has none (default 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. The bearer token is OPENAI_API_KEY, needed beyond this machine."""
    from skyenv.remote import listen

    listening = listen.Listening(arguments.host, arguments.port)
    if not listening.loopback and not os.environ.get(TOKEN):
        raise ConfigError(f"--host {arguments.host}: others can connect; set {TOKEN} to a secret that clients send")
    listen.run(_serve, arguments, listening)
    return 0


async def _serve(arguments: argparse.Namespace, listening: Listening) -> None:
    import anyio
    import torch

    from sky_trainer.engines import HFEngine
    from sky_trainer.models import load_model, load_tokenizer, on_best_device
    from sky_trainer.serving import ServedEngine
    from skyenv.remote import listen

    listener = listening.bind()
    with listener:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        model = on_best_device(load_model(arguments.model, arguments.dtype)).eval()
        tokenizer = load_tokenizer(arguments.model)
        engine = HFEngine(
            model, tokenizer.decode, [tokenizer.eos_token_id], seed=arguments.seed, max_batch=arguments.max_batch
        )
        stop = anyio.Event()
        async with engine, anyio.create_task_group() as group:
            app = ServedEngine(engine, model, arguments.model, os.environ.get(TOKEN, "")).app()
            await group.start(listen.watch_signals, lambda number: stop.set(), lambda: None)
            await listen.serve_app(app, listening, listener, stop, lambda url: print_line(f"serving at {url}"))
            group.cancel_scope.cancel()
