"""`skyenv top`: nodes and sandboxes live in a terminal, of one node or of all behind a gateway."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyenv.commands.output import print_line
from skyenv.errors import ConfigError, SandboxError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from skyenv.remote.client import SandboxClient

SORTS = ("name", "age", "idle", "memory", "pids", "last")
Line = dict[str, Any]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv top`."""
    top = commands.add_parser("top", help="show the nodes and sandboxes of a server, live")
    top.add_argument("--url", default="http://127.0.0.1:8765", help="node or gateway (default http://127.0.0.1:8765)")
    top.add_argument("--token", help="a client token of that server")
    top.add_argument("--token-file", type=Path, help="read the token from this file instead")
    top.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default 1)")
    top.add_argument("--sort", choices=SORTS, default="memory", help="order of the sandboxes (default memory)")
    top.add_argument("--once", action="store_true", help="print it once and end")
    top.add_argument("--json", action="store_true", help="print what the server says once, as one JSON object")
    top.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look until interrupted; once with `--once` or `--json`."""
    import anyio

    if arguments.interval <= 0:
        raise ConfigError("--interval: must be more than 0 seconds")
    try:
        anyio.run(_watch, arguments)
    except KeyboardInterrupt:
        pass
    return 0


async def _watch(arguments: argparse.Namespace) -> None:
    from skyenv.remote.client import connect

    token = arguments.token
    if arguments.token_file is not None:
        from skyenv.remote.tokens import read_token

        token = read_token(arguments.token_file)
    async with connect(arguments.url, token, patience=5.0) as client:
        if arguments.json:
            print_line(json.dumps(await client.overview()))
        elif arguments.once:
            _console().print(screen(await client.overview(), arguments.url, arguments.sort, 10_000))
        else:
            await _live(client, arguments)


async def _live(client: SandboxClient, arguments: argparse.Namespace) -> None:
    import anyio
    from rich.live import Live
    from rich.text import Text

    console = _console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            started = time.monotonic()
            try:
                seen: RenderableType = screen(
                    await client.overview(), arguments.url, arguments.sort, console.size.height - 1
                )
            except SandboxError as error:
                seen = Text(f"{arguments.url}: {error}", style="red")
            live.update(seen, refresh=True)
            await anyio.sleep(max(0.05, arguments.interval - (time.monotonic() - started)))


def _console() -> Any:
    try:
        from rich.console import Console
    except ImportError as error:
        raise ConfigError("skyenv top needs rich: pip install 'skyenv[top]', or use --json") from error
    return Console()


def screen(overview: dict[str, list[Line]], url: str, sort: str, height: int) -> RenderableType:
    """Both tables, 80 columns wide at least, with as many sandboxes as fit into `height` lines."""
    from rich.console import Group
    from rich.text import Text

    nodes, boxes = overview["nodes"], overview["sandboxes"]
    slots = sum(node.get("slots") or 0 for node in nodes)
    title = f"skyenv top  {url}  {len(boxes)} of {slots} sandboxes on {len(nodes)} node{'s'[: len(nodes) != 1]}"
    boxes = sorted(boxes, key=lambda line: _rank(line, sort))
    room = max(1, height - len(nodes) - 6)
    left_out = Text(f"... and {len(boxes) - room} more" if len(boxes) > room else "", style="dim")
    return Group(
        Text(f"{title}  {time.strftime('%H:%M:%S')}", style="bold", no_wrap=True, overflow="ellipsis"),
        _node_table(nodes),
        _sandbox_table(boxes[:room], named=len(nodes) > 1 or bool(nodes and nodes[0]["name"])),
        left_out,
    )


def _rank(line: Line, sort: str) -> tuple[float, str]:
    name = str(line.get("name", ""))
    return (0.0, name) if sort == "name" else (-(line.get(sort) or 0.0), name)


def _table(*columns: tuple[str, int]) -> Any:
    """A table of columns that keep so many characters; a negative number is one of numbers, 0 what room is left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold reverse", expand=True)
    for title, width in columns:
        table.add_column(
            title, justify="right" if width < 0 else "left", width=abs(width) or None, ratio=None if width else 1,
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip
    return table


def _node_table(nodes: list[Line]) -> Any:
    table = _table(
        ("NODE", 0), ("STATE", 8), ("USED", -9), ("QUEUE", -5), ("BUSY", -4), ("FROZEN", -6),
        ("EXECS", -6), ("P50", -5), ("P95", -5), ("OOM", -3), ("T/O", -3), ("REFUSED", -7),
    )  # fmt: skip
    for node in nodes:
        style = {"up": None, "draining": "yellow"}.get(node["state"], "red")
        used = f"{node['used']}/{node['slots']}" if node.get("slots") is not None else "-"
        table.add_row(
            node["name"] or "-", node["state"], used,
            *(_count(node.get(key)) for key in ("queued", "busy", "frozen", "execs")),
            *(_seconds(node.get(key)) for key in ("exec_p50", "exec_p95")),
            *(_count(node.get(key)) for key in ("oom", "timeouts", "refused")),
            style=style,
        )  # fmt: skip
    return table


def _sandbox_table(boxes: list[Line], named: bool) -> Any:
    where = [("NODE", 10)] if named else []
    table = _table(
        ("SANDBOX", 8), *where, ("STATE", 6), ("IMAGE", 0), ("AGE", -5), ("IDLE", -5),
        ("MEMORY", -6), ("PIDS", -4), ("CPU", -5), ("LAST", -5),
    )  # fmt: skip
    for box in boxes:
        style = {"busy": "green", "frozen": "cyan"}.get(box["state"])
        table.add_row(
            str(box["name"])[:8],
            *([str(box.get("node", "-"))[:12]] if named else []),
            box["state"],
            _image(box.get("image")),
            *(_seconds(box.get(key)) for key in ("age", "idle")),
            _bytes(box.get("memory")),
            _count(box.get("pids")),
            *(_seconds(box.get(key)) for key in ("cpu", "last")),
            style=style,
        )
    return table


def _image(name: str | None) -> str:
    """The telling end of an image's name: what comes after the last slash."""
    return "-" if name is None else name.rpartition("/")[2]


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _seconds(value: float | None) -> str:
    """A time in at most five characters."""
    if value is None:
        return "-"
    for limit, divisor, unit in ((0.0995, 0.001, "ms"), (99.5, 1, "s"), (5970, 60, "m"), (171_000, 3600, "h")):
        if value < limit:
            number = value / divisor
            return f"{number:.1f}{unit}" if number < 9.95 else f"{number:.0f}{unit}"
    return f"{value / 86400:.0f}d"


def _bytes(value: int | None) -> str:
    """A size in at most five characters."""
    if value is None:
        return "-"
    number = float(value)
    for unit in "BKMG":
        if number < 999.5:
            return f"{number:.0f}{unit}" if number >= 9.95 or unit == "B" else f"{number:.1f}{unit}"
        number /= 1024
    return f"{number:.1f}T"
