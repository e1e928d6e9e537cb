"""The editor's conformance rows on our editor, on openhands-aci and on openhands-tools: who passes what.

The rows are `skyenv.testing.editor_rows`, those named E...; ours runs in a real sandbox, the others on a directory of
this machine, as they do in production. They are installed from the package index at fixed versions, each into a
virtual environment of its own below the user's cache directory, on first use only (about 1 GB and some minutes); they
need Python 3.12 or newer. Of openhands-tools, the dependencies of its browser tools are left out. Rows marked (c) are
a choice where editors differ with reason. Exit status 1 when ours fails a row or another cannot be run.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio

import skyenv
from skyenv.testing.editor_desk import EditorDesk, place, prepare
from skyenv.testing.editor_rows import ROWS, Answer, Row, Step, check_row
from skyenv.tools import StrReplaceEditor

PEERS: dict[str, tuple[str, Sequence[Sequence[str]]]] = {
    "openhands-aci": ("aci", [["openhands-aci==0.3.3"]]),
    "openhands-tools": (
        "tools",
        [
            ["openhands-sdk==1.58.2"],
            ["--no-deps", "openhands-tools==1.58.2", "binaryornot==0.6.0", "libtmux==0.62.0", "cachetools==8.0.2"],
        ],
    ),
}
DRIVER = Path(__file__).parent / "peers" / "editor_driver.py"
TABLE = [row for row in ROWS if row.name.startswith("E")]
ROW_SECONDS = 10
Outcome = dict[str, str]
"""What is wrong, by row; empty text for a row that passes."""


async def run_ours() -> Outcome:
    """Our rows, in one sandbox; those that want a full disk in one whose files cannot grow."""
    outcome: Outcome = {}
    async with skyenv.connect() as client, client.sandbox() as box, client.sandbox(file_bytes=1 << 20) as small:
        for number, row in enumerate(TABLE):
            sandbox, root = small if row.limit else box, f"/tmp/row{number}"
            await prepare(row, sandbox, root)
            try:
                with anyio.fail_after(ROW_SECONDS):
                    await check_row(row, EditorDesk(StrReplaceEditor(workdir=root), sandbox, root))
                outcome[row.name] = ""
            except (AssertionError, TimeoutError) as error:
                outcome[row.name] = str(error) or "no answer in time"
    return outcome


class PeerDesk:
    """Another editor on a directory of this machine; all calls of the row were made at once."""

    def __init__(self, root: str, answers: list[tuple[str, bool]]) -> None:
        self._root = root
        self._answers = iter(answers)

    async def call(self, step: Step) -> Answer:
        """The answer to the next call."""
        return Answer(*next(self._answers))

    async def get(self, path: str) -> bytes | None:
        """Bytes of a file; None when there is none."""
        return bytes_of(Path(place(self._root, path)))

    async def mode(self, path: str) -> int | None:
        """Mode bits of a file."""
        return mode_of(Path(place(self._root, path)))


def bytes_of(file: Path) -> bytes | None:
    """What a file holds; None when there is none."""
    return file.read_bytes() if file.is_file() else None


def mode_of(file: Path) -> int:
    """Mode bits of a file; -1 when there is none."""
    return file.stat().st_mode & 0o7777 if file.exists() else -1


def lay_out(row: Row, root: str) -> None:
    """Make the files of a row."""
    Path(root).mkdir()
    for path, data in row.files.items():
        file = Path(place(root, path))
        (file if data is None else file.parent).mkdir(parents=True, exist_ok=True)
        if data is not None:
            file.write_bytes(data)
    for path in set(row.modes) & set(row.files):
        Path(place(root, path)).chmod(row.modes[path])
    if row.fifo:
        os.mkfifo(place(root, row.fifo))


def as_request(row: Row, root: str) -> str:
    """A row as the driver reads it."""
    plain = lambda data: None if data is None else base64.b64encode(data).decode()  # noqa: E731
    steps = [
        {
            "command": step.command,
            "arguments": dict(step.arguments),
            "path": step.path if step.raw else place(root, step.path),
            "race": plain(step.race),
            "write": plain(step.write),
        }
        for step in row.steps
    ]
    return json.dumps({"root": root, "steps": steps, "limit": row.limit, "seconds": ROW_SECONDS})


async def run_peer(python: Path, kind: str) -> Outcome:
    """The rows on another editor, through one driver process."""
    outcome: Outcome = {}
    with driver(python, kind) as ask, tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(TABLE):
            root = f"{folder}/row{number}"
            lay_out(row, root)
            reply = ask(as_request(row, root))
            try:
                if "raised" in reply:
                    raise AssertionError(f"raised {reply['raised']}")
                await check_row(row, PeerDesk(root, reply["answers"]))
                outcome[row.name] = ""
            except AssertionError as error:
                outcome[row.name] = str(error)
    return outcome


@contextlib.contextmanager
def driver(python: Path, kind: str) -> Iterator[Callable[[str], dict[str, Any]]]:
    """A driver process; its input is closed and it is waited for at the end."""
    environment = {**os.environ, "OPENHANDS_SUPPRESS_BANNER": "1", "PYTHONPATH": ""}
    process = subprocess.Popen(
        [python, DRIVER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(request: str) -> dict[str, Any]:
        stdin.write(request + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit(f"{kind}: the driver ended with status {process.wait()}; run {python} {DRIVER} {kind}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield ask
    finally:
        stdin.close()
        stdout.close()
        process.wait(timeout=60)


def environment_of(name: str, python: str) -> Path:
    """The interpreter of a peer's own environment, which is made when it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyenv" / "editor_peers"
    steps = PEERS[name][1]
    home = cache / "-".join([steps[-1][-1 if len(steps) == 1 else 1].replace("==", "-"), Path(python).name])
    interpreter, complete = home / "bin" / "python", home / "complete"
    if not complete.exists():
        shutil.rmtree(home, ignore_errors=True)
        print(f"installing {name} into {home}", flush=True)
        try:
            subprocess.run([python, "-m", "venv", home], check=True)
            for packages in steps:
                subprocess.run([interpreter, "-m", "pip", "install", "-q", "--prefer-binary", *packages], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{name} cannot be installed ({error}); it needs the package index") from error
        complete.touch()
    return interpreter


def find_python() -> str:
    """An interpreter of 3.12 or newer."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob("3.1[2-9]*/bin/python3"))
    names = [sys.executable, *(shutil.which(f"python3.{minor}") or "" for minor in (12, 13)), *map(str, pyenv)]
    for name in filter(None, names):
        asked = subprocess.run([name, "-c", "import sys; print(sys.version_info >= (3, 12))"], capture_output=True)
        if asked.stdout.strip() == b"True":
            return name
    raise SystemExit("the other editors need Python 3.12 or newer; name one with --python")


def show(outcomes: dict[str, Outcome], why: bool) -> None:
    """Print the table, and with `why` what each failed row came to."""
    print(f"{'row':42}" + "".join(f"{name:>18}" for name in outcomes))
    for row in TABLE:
        marks = ["fail" if outcome[row.name] else "pass" for outcome in outcomes.values()]
        print(f"{row.name + (' (c)' if row.decided else ''):42}" + "".join(f"{mark:>18}" for mark in marks))
        if why:
            for name, outcome in outcomes.items():
                if outcome[row.name]:
                    print(f"    {name}: {outcome[row.name]!r:.300}")


def main() -> None:
    """Run everything, print the table, end with the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--why", action="store_true", help="say what each failed row came to")
    parser.add_argument("--python", help="interpreter of 3.12 or newer for the other editors")
    options = parser.parse_args()
    python = options.python or find_python()
    outcomes = {"skyenv": anyio.run(run_ours)}
    for name, (kind, _) in PEERS.items():
        outcomes[name] = anyio.run(run_peer, environment_of(name, python), kind)
    show(outcomes, options.why)
    counts = {
        name: {"passed": sum(not why for why in rows.values()), "failed": sum(map(bool, rows.values()))}
        for name, rows in outcomes.items()
    }
    print(json.dumps(counts) if options.json else "\n".join(f"{name}: {count}" for name, count in counts.items()))
    sys.exit(bool(counts["skyenv"]["failed"]))


if __name__ == "__main__":
    main()
