"""B: nothing that a command starts can read the session's own input, or wait for any."""

from __future__ import annotations

import pytest

from catalogue.sessions import Run, run_all

ROWS: dict[str, list[Run]] = {
    "B1 reading standard input": [
        Run("cat; read x; echo [$x]; python3; sh", "[]\n"),
        Run("python3 -c 'input()'", code=1),
    ],
    "B1 programs that ask": [Run("su user -c 'su root -c id'; sudo -S id; ssh nowhere true", code=None)],
    "B1 a program in the middle does not eat the rest": [Run("cat\necho one\nhead -1\necho two", "one\ntwo\n")],
    "B2 background job reads nothing": [Run("cat > /tmp/x & wait; wc -c < /tmp/x", "0\n")],
    "B4 standard input through a pipe": [Run("seq 2 | cat < /dev/stdin", "1\n2\n")],
    "B5 no terminal": [Run("stty -a; tput cols >/dev/null; tty", code=1)],
    "B5 a pipeline that would want one": [Run("yes 2>/dev/null | head -3 | tail -1; setsid cat | tail -1", "y\n")],
}


@pytest.mark.parametrize("row", ROWS)
async def test_session_survives(url: str, row: str) -> None:
    await run_all(url, ROWS[row])


async def test_b1_a_plain_sh_reads_nothing(local_url: str) -> None:
    await run_all(local_url, ROWS["B1 reading standard input"], shell="sh")
