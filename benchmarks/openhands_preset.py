"""Whether the editor of the preset `openhands` says what openhands-aci says: random calls on both, text by text.

Files are ASCII with LF line ends, end with one and have no backslash: elsewhere the preset keeps files whole on purpose
where that editor does not (its guess at an encoding takes a backslash for a yen sign now and then). The other editor
is installed as `editor_conformance.py` does. Exit status 1 when a text differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from typing import Any

import anyio
from editor_conformance import as_request, driver, environment_of, find_python, lay_out

import skyenv
from skyenv.core import Sandbox
from skyenv.testing.editor_desk import place, prepare
from skyenv.testing.editor_rows import FILE, Row, Step
from skyenv.tools.openhands import OpenHandsEditor

CALLS_PER_FILE = 8
PIECES = ("a", "b b", "\n", "\n\n", "    x = 1\n", "\tif y:\n", "`q`", "foo\n", "def f():\n")
COMMANDS = ("view", "view", "str_replace", "str_replace", "insert", "undo_edit", "create")


TREE: dict[str, bytes | None] = {
    **{
        "b.py": b"a\n",
        "a/in.py": b"",
        "a/deep/no.py": b"",
        ".git/config": b"",
        "empty": None,
        "a-b/x": b"",
        "a.c": b"",
    },
    **{"big.txt": b"x y\n" * 9000, FILE: b"a\n"},
}
FIXED = Row(
    "fixed",
    TREE,
    (
        *(Step("view", path=path) for path in (".", "empty", ".git", "a/", "big.txt", "none", "//b.py")),
        *(Step("view", {"view_range": lines}, path=path) for path in ("big.txt", ".") for lines in ([2, 8000], [1])),
        *(Step("str_replace", arguments, path=path) for path in ("a", "b.py") for arguments in ({}, {"old_str": "a"})),
        *(Step("insert", arguments, path="b.py") for arguments in ({}, {"insert_line": 1}, {"new_str": "x"})),
        *(Step("undo_edit", path=path) for path in ("a", "a.c")),
    ),
)


def random_row(rng: random.Random, number: int) -> Row:
    """A file and calls on it, most of which make sense."""
    data = "".join(rng.choices(PIECES, k=rng.randrange(14))) + "\n"
    steps = [random_step(rng, data) for _ in range(CALLS_PER_FILE)]
    return Row(str(number), {FILE: data.encode()}, tuple(steps))


def random_step(rng: random.Random, data: str) -> Step:
    """One call, now and then on a file that is not there."""
    text = lambda: "".join(rng.choices(PIECES, k=rng.randrange(3)))  # noqa: E731
    command = rng.choice(COMMANDS)
    arguments: dict[str, Any] = {}
    if command == "view" and rng.random() < 0.6:
        arguments["view_range"] = [rng.randrange(-1, 9), rng.randrange(-1, 12)]
    if command == "str_replace":
        start = rng.randrange(len(data))
        arguments["old_str"] = data[start : start + rng.randrange(1, 12)] if rng.random() < 0.8 else text()
        arguments |= {"new_str": text()} if rng.random() < 0.9 else {}
    if command == "insert":
        arguments = {"insert_line": rng.randrange(-1, 10), "new_str": text()}
    if command == "create":
        arguments = {"file_text": "x\n"}
    return Step(command, arguments, path=rng.choice([FILE] * 9 + ["g.txt"]))


async def compare(row: Row, root: str, answers: list[tuple[str, bool]], box: Sandbox) -> tuple[int, list[str]]:
    """How many texts were compared until a file lost its last line break, and those that differ."""
    editor, compared, different = OpenHandsEditor(workdir=root), 0, []
    await prepare(row, box, root)
    for step, (text, refused) in zip(row.steps, answers, strict=True):
        call = {"command": step.command, "path": place(root, step.path), **step.arguments}
        said, expected = await editor.run(call, box), f"ERROR:\n{text}" if refused else text
        compared += 1
        if said != expected:
            return compared, [f"{call}\n  theirs {expected!r}\n  ours   {said!r}"]
        data = await box.read_file(place(root, FILE))
        if data and not data.endswith(b"\n"):
            break
    return compared, different


async def run(python: str, files: int, seed: int) -> dict[str, Any]:
    """Compare on a tree and on so many files."""
    rng, compared, different, raised = random.Random(seed), 0, [], []
    async with skyenv.connect() as client, client.sandbox() as box:
        with driver(environment_of("openhands-aci", python), "aci") as ask, tempfile.TemporaryDirectory() as folder:
            for row in [FIXED, *(random_row(rng, number) for number in range(files))]:
                root = f"{folder}/{row.name}"
                lay_out(row, root)
                reply = ask(as_request(row, root))
                if "raised" in reply:
                    raised.append(reply["raised"])
                    continue
                count, wrong = await compare(row, root, reply["answers"], box)
                compared, different = compared + count, different + wrong
    print("\n".join(different + [f"openhands-aci raised {error}" for error in raised]))
    return {"calls": compared, "equal": compared - len(different), "files_where_it_raised": len(raised)}


def main() -> None:
    """Run, print what differs, end with the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--files", type=int, default=200, help="how many files to make calls on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", help="interpreter of 3.12 or newer for the other editor")
    options = parser.parse_args()
    counts = anyio.run(run, options.python or find_python(), options.files, options.seed)
    print(json.dumps(counts) if options.json else f"{counts['equal']} of {counts['calls']} texts are equal")
    sys.exit(counts["equal"] != counts["calls"])


if __name__ == "__main__":
    main()
