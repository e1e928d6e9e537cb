"""Start the inference servers of a test run: `python -m tests.engines.serve FOLDER FLAVOUR...`.

Makes a tiny model in FOLDER/model, starts a server of each flavour for it, writes FOLDER/FLAVOUR.url once it is ready
or FOLDER/FLAVOUR.error, and ends, with the servers, when its standard input does.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from skyenv.engines.starting import RunningServer, ServerSpec, start, wait_until_ready
from skyenv.errors import SkyEnvError
from tests.engines.models import save_model

ENVIRONMENTS = Path(__file__).parents[2] / ".engines"
OPTIONS = {
    "vllm": ("--max-model-len", "4096", "--max-num-seqs", "64"),
    "sglang": ("--mem-fraction-static", "0.1", "--max-total-tokens", "40000"),
}
READY_WITHIN = 1200.0


def spec(flavour: Literal["vllm", "sglang"], model: Path, *options: str, **env: str) -> ServerSpec:
    """A server on this machine's processor, from the environment that `.ci/venvs` made."""
    return ServerSpec(
        flavour,
        str(ENVIRONMENTS / flavour / "bin" / "python"),
        str(model),
        name="tiny",
        device="cpu",
        options=(*OPTIONS[flavour], *options),
        env=env,
    )


def main(folder: Path, flavours: list[str]) -> None:
    """Until standard input ends."""
    save_model(folder / "model", seed=0)
    servers: dict[str, RunningServer] = {}
    with ExitStack() as stack:
        for flavour in flavours:
            servers[flavour] = start(spec(flavour, folder / "model"), folder / f"{flavour}.log")  # type: ignore[arg-type]
            stack.callback(servers[flavour].stop, 0.0)
        for flavour, server in servers.items():
            try:
                wait_until_ready(server, folder / f"{flavour}.log", READY_WITHIN)
            except SkyEnvError as error:
                note(folder / f"{flavour}.error", str(error))
            else:
                note(folder / f"{flavour}.url", server.url)
        sys.stdin.read()


def note(path: Path, text: str) -> None:
    """Appear with all of the text at once."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
