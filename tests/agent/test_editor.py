"""The editor's conformance rows, on a file system in memory and on a real directory, and what rows cannot say."""

from __future__ import annotations

import errno
import os
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv.errors import SandboxPathError
from skyenv.testing.editor_desk import EditorDesk, place
from skyenv.testing.editor_rows import ROWS, Row, check_row
from skyenv.tools import StrReplaceEditor, check_arguments
from skyenv.tools.edit_text import EditRefused, insert, replace

F = "/repo/f.txt"


class Desk:
    """An editor on files, called as an environment calls it: arguments are checked first."""

    def __init__(self, files: Any, **options: Any) -> None:
        self.files = files
        self.tool = StrReplaceEditor(**options)

    async def __call__(self, command: str, path: str = F, **rest: Any) -> str:
        checked = check_arguments(self.tool.spec, {"command": command, "path": path, **rest})
        return f"ERROR: {checked}" if isinstance(checked, str) else await self.tool.run(checked, self.files)


@pytest.fixture
def desk(files: Any) -> Desk:
    return Desk(files)


def rows(text: str) -> list[str]:
    """The numbered lines of an answer."""
    return [line for line in text.split("\n") if "\t" in line and line.split("\t")[0].strip().isdigit()]


class RowDesk(EditorDesk):
    """The rows on files of a test; only a real directory keeps modes."""

    async def mode(self, path: str) -> int | None:
        return await super().mode(path) if self._files.real else None  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_row(row: Row, files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files.mkdir("/w")
    for path, data in row.files.items():
        files.mkdir(place("/w", path)) if data is None else files.put(place("/w", path), data)
    if row.fifo:
        files.fifo(place("/w", row.fifo))
    if files.real:
        for path in set(row.modes) & set(row.files):
            os.chmod(files.host(place("/w", path)), row.modes[path])
    else:
        files.nodes["/dev"], files.nodes["/dev/zero"] = None, "device"
    if row.limit:
        monkeypatch.setattr(files, "write_file", refuse_writes(errno.ENOSPC))
    await check_row(row, RowDesk(StrReplaceEditor(workdir="/w"), files, "/w"))


def test_rows_are_told_apart_by_name() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) > 100


def refuse_writes(code: int) -> Any:
    async def write_file(path: str, data: bytes, *, expected: bytes | None = None) -> None:
        raise SandboxPathError(code, os.strerror(code), path)

    return write_file


async def test_e12_numbers_stay_exact_under_the_cut(desk: Desk) -> None:
    desk.files.put(F, b"".join(b"line %d of many\n" % i for i in range(1, 3001)))
    answer = await desk("view")
    shown = rows(answer)
    assert len(answer) <= 16_000
    assert [int(row.split("\t")[0]) for row in shown] == list(range(1, len(shown) + 1))
    assert all(row.split("\t")[1] == f"line {i} of many" for i, row in enumerate(shown, 1))
    assert f"up to line {len(shown)} of 3000" in answer
    assert len(shown) > 500
    assert rows(await desk("view", view_range=[2900, 2902])) == [f"  {i}\tline {i} of many" for i in (2900, 2901, 2902)]


async def test_r3_one_long_line_is_cut_inside(desk: Desk) -> None:
    desk.files.put(F, b"x" * 50_000 + b"\nb\n")
    answer = await desk("view")
    assert len(answer) <= 16_000
    shown = rows(answer)[0].split("... [")[0].count("x")
    assert f"{50_000 - shown} more characters" in answer


async def test_r15_large_file_only_by_range(desk: Desk) -> None:
    line = b"0123456789" * 10
    desk.files.put(F, (line + b"\n") * 120_000)
    assert "view_range" in await desk("view")
    assert rows(await desk("view", view_range=[119_999, -1])) == [f"{i}\t{line.decode()}" for i in (119_999, 120_000)]
    assert "[1, 120000]" in await desk("view", view_range=[120_001, -1])
    assert "too many to edit" in await desk("str_replace", old_str="0", new_str="1")


@pytest.mark.parametrize("letter", ["z", "\u00e9", "\u4e16"])
async def test_r15_one_giant_line(letter: str, desk: Desk) -> None:
    """What is left out of a line is told exactly, and a character cut by the limit spoils nothing."""
    giant = letter * (11_000_000 // len(letter.encode()))
    desk.files.put(F, f"first\n{giant}\nlast\n".encode())
    answer = await desk("view", view_range=[2, 2])
    shown = answer.count(letter)
    assert 15_000 < shown < 16_000
    assert f"... [{(len(giant) - shown) * len(letter.encode())} more bytes in this line]" in answer
    assert "UTF-8" not in answer
    answer = await desk("view", view_range=[1, -1])
    assert rows(answer) == ["     1\tfirst"]
    assert "up to line 1 of 3" in answer
    assert rows(await desk("view", view_range=[3, 3])) == ["     3\tlast"]


async def test_r10_ten_edits_can_be_undone(desk: Desk) -> None:
    desk.files.put(F, b"0\n")
    for i in range(12):
        await desk("str_replace", old_str=str(i), new_str=str(i + 1))
    for i in reversed(range(12)):
        await desk("undo_edit")
        assert desk.files.get(F) == b"%d\n" % i


async def test_e47_directories(desk: Desk) -> None:
    for path in (
        "/repo/b.py",
        "/repo/a/in.py",
        "/repo/a/deep/no.py",
        "/repo/.git/config",
        "/repo/a/.hid",
        "/repo/.x/y",
    ):
        desk.files.put(path, b"")
    desk.files.mkdir("/repo/empty")
    answer = (await desk("view", "/repo")).split("\n")
    assert answer[1:7] == ["/repo/", "/repo/a/", "/repo/a/deep/", "/repo/a/in.py", "/repo/b.py", "/repo/empty/"]
    assert "3 hidden" in answer[7]
    assert len(answer) == 8
    assert (await desk("view", "/repo/empty")).split("\n")[1:] == ["/repo/empty/"]
    assert (await desk("view", "/repo/.git")).split("\n")[1:] == ["/repo/.git/", "/repo/.git/config"]


async def test_r17_cap(desk: Desk) -> None:
    for i in range(700):
        desk.files.put(f"/repo/file{i:04}", b"")
    answer = await desk("view", "/repo")
    assert "more entries" in answer
    assert len(answer) <= 16_000


async def test_e14_e15_paths(files: Any) -> None:
    desk = Desk(files, workdir="/repo")
    files.put("/repo/f.txt", b"a\n")
    assert "No such file" in await desk("view", "/repo/missing")
    assert "did you mean /repo/f.txt?" in await desk("view", "f.txt")
    assert "did you mean /repo/f.txt?" in await desk("view", " /repo/f.txt")
    assert "absolute" in await desk("view", "missing.txt")
    assert "absolute" in await desk("view", "~/x")
    assert (await desk("view", " /etc/x")).startswith("ERROR")
    assert "empty" in await desk("view", "")
    assert "too long" in await desk("view", "/" + "n" * 5000)
    assert len(await desk("view", "/" + "n" * 5000)) < 500
    assert "NUL" in await desk("view", "/repo/\0x")
    assert rows(await desk("view", "/repo/../repo/./f.txt")) == ["     1\ta"]
    assert rows(await desk("view", "//repo/f.txt")) == ["     1\ta"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
async def test_e58_refused_writes_are_answers(code: int, files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files.put(F, b"a\n")
    monkeypatch.setattr(files, "write_file", refuse_writes(code))
    desk = Desk(files)
    assert os.strerror(code) in await desk("str_replace", old_str="a", new_str="b")
    assert os.strerror(code) in await desk("create", "/repo/new", file_text="b")
    assert files.get(F) == b"a\n"
    assert "no history" in await desk("undo_edit")


BYTES = st.lists(st.sampled_from([b"a", b"b", b"\n", b"\r\n", b"\t", b" ", "é".encode(), b"\xe9"]), max_size=30).map(
    b"".join
)
TEXT = st.lists(st.sampled_from(["a", "b", "\n", "\t", " ", "é", "\r\n"]), max_size=8).map("".join)


@given(data=BYTES, old=TEXT, new=TEXT)
def test_replace_leaves_bytes_outside_the_edit(data: bytes, old: str, new: str) -> None:
    try:
        edited = replace(data, old, new)
    except EditRefused:
        return
    unified, after = data.replace(b"\r\n", b"\n"), edited.data.replace(b"\r\n", b"\n")
    pairs = [(old, new)]
    pairs += [(o.removeprefix("\n"), n.removeprefix("\n")) for o, n in pairs]
    pairs += [(o.removesuffix("\n"), n.removesuffix("\n")) for o, n in pairs]
    plain = [(o.replace("\r\n", "\n").encode(), n.replace("\r\n", "\n").encode()) for o, n in pairs]
    assert any(unified.count(o) == 1 and unified.replace(o, n) == after for o, n in plain if o)
    untouched = edited.first_line - 1
    assert data.split(b"\n")[:untouched] == edited.data.split(b"\n")[:untouched]


@given(data=BYTES, line=st.integers(0, 12), text=TEXT)
def test_insert_keeps_every_other_line(data: bytes, line: int, text: str) -> None:
    try:
        edited = insert(data, line, text)
    except EditRefused:
        return
    lines = edited.data.split(b"\n")
    block = lines[line : line + edited.count]
    others = b"\n".join(lines[:line] + lines[line + edited.count :])
    assert others.removesuffix(b"\n").removesuffix(b"\r") == data.removesuffix(b"\n").removesuffix(b"\r")
    assert b"\n".join(block).replace(b"\r", b"").decode() == text.replace("\r", "").removesuffix("\n")


PIECES = (
    b"a",
    b"bb",
    b"\n",
    b"\r\n",
    b"\t",
    b"  ",
    "\u00e9\U0001f389".encode(),
    b"\xe9",
    b"def f():\n",
    b"\\1\\n",
    b"x" * 80,
)
WORDS = ("a", "bb", "\n", "\t", "  ", "\u00e9", "def f():\n", "\\1", "y", "a\nb", "")


async def test_ten_thousand_edits_against_bytes(files: Any) -> None:
    """Whatever is edited, the bytes before and after the edit stay, and undo gives back every version."""
    rng = random.Random(files.real)
    desk = Desk(files)
    data, versions, edits, started = b"", [], 0, time.process_time()
    files.put(F, data)
    for number in range(5_000):
        if number % 40 == 0:
            data, versions = b"".join(rng.choices(PIECES, k=rng.randrange(40))), []
            desk = Desk(files)
            files.put(F, data)
        if versions and rng.random() < 0.1:
            await desk("undo_edit")
            data = versions.pop()
        elif rng.random() < 0.5:
            lines = data.count(b"\n") + 1
            at, text = rng.randrange(-1, lines + 2), "".join(rng.choices(WORDS, k=3))
            data = await edited_by_insert(desk, data, at, text, versions)
        else:
            old = pick(rng, data)
            data = await edited_by_replace(desk, data, old, "".join(rng.choices(WORDS, k=2)), versions)
        edits += len(versions)
        assert files.get(F) == data
    assert edits > 2_000
    assert time.process_time() - started < 20


def pick(rng: random.Random, data: bytes) -> str:
    """Some text of the file, most of the time."""
    if not data or rng.random() < 0.2:
        return "".join(rng.choices(WORDS, k=2))
    start = rng.randrange(len(data))
    return data[start : start + rng.randrange(1, 30)].decode(errors="ignore").replace("\r\n", "\n")


async def edited_by_insert(desk: Desk, data: bytes, at: int, text: str, versions: list[bytes]) -> bytes:
    """Every line of the file is still there, in order, with the new lines after line `at`."""
    answer = await desk("insert", insert_line=at, new_str=text)
    after = desk.files.get(F)
    if answer.startswith("ERROR"):
        assert after == data
        return data
    lines = data.split(b"\n")[: data.count(b"\n") + (not data.endswith(b"\n") and data != b"")]
    head = b"".join(line + b"\n" for line in lines[:at])
    open_head = data[: len(head)]
    tail = data[len(open_head) :]
    assert after.startswith(open_head)
    assert after.endswith(tail)
    middle = after[len(open_head) : len(after) - len(tail)]
    expected = (b"" if open_head.endswith(b"\n") or not open_head else b"\n") + text.encode()
    expected += b"" if text.endswith("\n") else b"\n"
    assert middle.replace(b"\r\n", b"\n") == expected.replace(b"\r\n", b"\n")
    versions.append(data)
    return after


async def edited_by_replace(desk: Desk, data: bytes, old: str, new: str, versions: list[bytes]) -> bytes:
    """What lies before and after the one occurrence is untouched."""
    answer = await desk("str_replace", old_str=old, new_str=new)
    after = desk.files.get(F)
    if answer.startswith("ERROR"):
        assert after == data
        return data
    shared = next((i for i, (x, y) in enumerate(zip(data, after, strict=False)) if x != y), min(len(data), len(after)))
    explained = False
    for trimmed, put in trims(old, new):
        for start in range(shared + 1):
            end = end_of(data, start, trimmed)
            middle = after[start : len(after) - (len(data) - end)]
            outside = after.startswith(data[:start]) and after.endswith(data[end:])
            explained |= end >= start and outside and middle.replace(b"\r\n", b"\n") == put
    assert explained
    versions.append(data)
    return after


def trims(old: str, new: str) -> list[tuple[bytes, bytes]]:
    """The texts as given, and without one line break that both share at either end."""
    pairs = [(old, new)]
    pairs += [(o[1:], n[1:]) for o, n in pairs if o.startswith("\n") and (n.startswith("\n") or not n)]
    pairs += [(o[:-1], n[:-1]) for o, n in pairs if o.endswith("\n") and (n.endswith("\n") or not n)]
    return [(o.encode(), n.encode()) for o, n in pairs if o]


def end_of(data: bytes, start: int, text: bytes) -> int:
    """Where `text` ends in the file when it starts at `start`, its line breaks matching CRLF too; -1 if it does not."""
    at = start
    for byte in text:
        if byte == 10 and data.startswith(b"\r\n", at):
            at += 2
        elif at < len(data) and data[at] == byte:
            at += 1
        else:
            return -1
    return at
