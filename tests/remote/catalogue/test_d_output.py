"""D: output is bytes, complete up to its limit, and no sandbox's output holds another one up."""

from __future__ import annotations

import anyio
import pytest

from catalogue.sessions import PATIENCE, Run, run_all, session
from skyenv.remote.client import connect

LINES = "".join(f"{n}\n" for n in range(1, 200_001))

ROWS: dict[str, list[Run]] = {
    "D1 bytes that are not text": [
        Run("printf '\\xff\\xfe\\x00ok'", "��\x00ok"),
        Run("cat /bin/ls | wc -c; cat /bin/ls; head -c 1000000 /dev/urandom", code=0),
    ],
    "D3 a diff of 50 MB": [
        Run("git init -q r && cd r && head -c 25000000 /dev/zero | tr '\\0' 'a' | fold > f && git add f"),
        Run("tr a b < f > g && mv g f", timeout=200.0),
        Run("git diff", lambda out: 1 << 20 <= len(out) < 3 << 20 and "left out" in out, timeout=200.0),
    ],
    "D5 every line arrives": [Run("seq 1 200000", LINES, options={"max_output_bytes": 1 << 22})],
    "D5 every line arrives through a terminal": [
        Run("seq 1 200000", LINES, options={"max_output_bytes": 1 << 22, "terminal": True}),
    ],
    "D8 long line": [Run("printf '%010000d' 7", "7".rjust(10000, "0"))],
    "D8 progress bars and colours": [Run("printf '1%%\\r2%%\\r\\033[31mred\\033[0m'", "1%\r2%\r\x1b[31mred\x1b[0m")],
    "D8 order of both streams": [Run("echo a; echo b >&2; echo c", "a\nb\nc\n")],
    "D10 errors through a pipe": [Run("ls /nope 2>&1 | tail -1", lambda out: "/nope" in out)],
    "D10 writer to a closed pipe": [
        Run("yes | head -1", "y\n"), Run("set -o pipefail; yes | head -1", "y\n", code=141),
    ],
    "D10 reopened output": [
        Run("echo a > /dev/stdout; echo b > /dev/stderr; echo c > /proc/self/fd/1", "a\nb\nc\n"),
    ],
    "D10 output from another user": [Run("su user -c 'echo a; echo b > /dev/stderr'", "a\nb\n")],
    "D6 100 MB": [Run("yes | head -c 100000000", lambda out: len(out) < 1 << 21, timeout=200.0)],
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
async def test_session_survives(url: str, row: str) -> None:
    await run_all(url, ROWS[row])


async def test_d6_endless_output_holds_nobody_up(url: str) -> None:
    """One sandbox prints without end and never gets ready; the one beside it answers as ever."""
    async with connect(url, "secret") as client, client.sandbox() as loud:
        async with session(url) as quiet, anyio.create_task_group() as group:
            ended: list[int] = []

            async def shout() -> None:
                ended.append((await loud.exec("yes 2>&1", timeout=500.0)).exit_code)

            group.start_soon(shout)
            for _number in range(20):
                result = await quiet.exec("echo here", timeout=PATIENCE)
                assert (result.output, result.timed_out) == ("here\n", False)
            assert not ended
            assert (await loud.interrupt()).exit_code == 130
        assert ended == [130]
        assert (await loud.exec("yes 2>&1", timeout=1.0)).exit_code == 124
        assert (await loud.exec("echo alive", timeout=PATIENCE)).output == "alive\n"
