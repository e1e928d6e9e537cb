"""The editor's conformance rows, each on a file system in memory and on a real directory."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv.errors import SandboxConflict, SandboxPathError
from skyenv.tools import StrReplaceEditor, check_arguments
from skyenv.tools.edit_text import EditRefused, insert, replace

F = "/work/f.txt"


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


VIEWS: dict[str, tuple[bytes, Any, list[str]]] = {
    "E1-final-newline": (b"a\nb\nc\n", None, ["     1\ta", "     2\tb", "     3\tc"]),
    "E1-no-final-newline": (b"a\nb\nc", None, ["     1\ta", "     2\tb", "     3\tc"]),
    "E2-one-empty-line": (b"\n", None, ["     1\t"]),
    "E3-one-line": (b"a\nb\nc\n", [2, 2], ["     2\tb"]),
    "E3-to-the-end": (b"a\nb\nc\n", [2, -1], ["     2\tb", "     3\tc"]),
    "E6-strings": (b"a\nb\nc\n", ["1", "2"], ["     1\ta", "     2\tb"]),
    "E6-json-text": (b"a\nb\nc\n", "[1, 2]", ["     1\ta", "     2\tb"]),
    "E6-floats": (b"a\nb\nc\n", [1.0, 2.0], ["     1\ta", "     2\tb"]),
    "E7-empty-range": (b"a\nb\n", [], ["     1\ta", "     2\tb"]),
    "E7-null-range": (b"a\nb\n", None, ["     1\ta", "     2\tb"]),
    "E9-carriage-returns-not-shown": (b"a\r\nb\r\n", None, ["     1\ta", "     2\tb"]),
    "R1-other-separators-are-text": ("a\x0cb\u2028c\x85d\n".encode(), None, ["     1\ta\x0cb\u2028c\x85d"]),
    "R12-tabs-kept": (b"\tx\n", None, ["     1\t\tx"]),
    "E51-undeclared-bytes-escaped": (b"caf\xe9\n", None, ["     1\tcaf\\xe9"]),
    "R13-declared-encoding": (b"# -*- coding: latin-1 -*-\ncaf\xe9\n", [2, 2], ["     2\tcaf\u00e9"]),
    "E54-byte-order-mark-not-shown": (b"\xef\xbb\xbfa\n", None, ["     1\ta"]),
}


@pytest.mark.parametrize("row", VIEWS)
async def test_view(row: str, desk: Desk) -> None:
    data, view_range, expected = VIEWS[row]
    desk.files.put(F, data)
    arguments = {} if view_range is None else {"view_range": view_range}
    assert rows(await desk("view", **arguments)) == expected
    assert desk.files.get(F) == data


REFUSED_RANGES = {
    "E4-start-behind-end": [4, 5],
    "E4-zero": [0, 2],
    "E4-reversed": [3, 2],
    "E4-end-minus-two": [1, -2],
    "R4-one-number": [1],
    "R4-three-numbers": [1, 2, 3],
    "E6-boolean": [True, 2],
    "E6-words": "first to last",
}


@pytest.mark.parametrize("row", REFUSED_RANGES)
async def test_view_range_refused(row: str, desk: Desk) -> None:
    desk.files.put(F, b"a\nb\nc\n")
    answer = await desk("view", view_range=REFUSED_RANGES[row])
    assert answer.startswith("ERROR:")
    assert "view_range" in answer
    if row.startswith("E4"):
        assert "[1, 3]" in answer or "[0, 2]" in answer


async def test_e4_end_is_clamped_and_said(desk: Desk) -> None:
    desk.files.put(F, b"a\nb\nc\n")
    answer = await desk("view", view_range=[2, 10])
    assert rows(answer) == ["     2\tb", "     3\tc"]
    assert "only 3 lines" in answer


async def test_e2_e7_empty_file(desk: Desk) -> None:
    desk.files.put(F, b"")
    assert "is empty" in await desk("view")
    assert "is empty" in await desk("view", view_range=[1, 1])


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


EDITS: dict[str, tuple[bytes, dict[str, Any], bytes]] = {
    "E9-crlf-replace": (b"a\r\nb\r\n", {"old_str": "b", "new_str": "X"}, b"a\r\nX\r\n"),
    "E10-lf-matches-crlf": (b"a\r\nb\r\nc\r\n", {"old_str": "a\nb", "new_str": "a\nB"}, b"a\r\nB\r\nc\r\n"),
    "R11-mixed-lines-untouched": (
        b"a\r\nb\nc\r\nd\r\n",
        {"old_str": "d", "new_str": "D\nE"},
        b"a\r\nb\nc\r\nD\r\nE\r\n",
    ),
    "R11-local-style-wins": (
        b"a\nb\nc\r\nd\r\ne\r\n",
        {"old_str": "a\nb", "new_str": "A\nB"},
        b"A\nB\nc\r\nd\r\ne\r\n",
    ),
    "R11-crlf-in-old": (b"a\nb\n", {"old_str": "a\r\nb", "new_str": "ab"}, b"ab\n"),
    "E29-new-missing-deletes": (b"a\nb\n", {"old_str": "b\n"}, b"a\n"),
    "E33-tabs-kept": (b"\tx\n\ty\n", {"old_str": "x", "new_str": "z"}, b"\tz\n\ty\n"),
    "E51-latin-1-ascii-part": (b"caf\xe9 one\n", {"old_str": "one", "new_str": "two"}, b"caf\xe9 two\n"),
    "R13-declared-encodable": (
        b"# coding: latin-1\ncaf\xe9\n",
        {"old_str": "caf\u00e9", "new_str": "th\u00e9"},
        b"# coding: latin-1\nth\xe9\n",
    ),
    "E54-byte-order-mark-kept": (b"\xef\xbb\xbfa\n", {"old_str": "a", "new_str": "b"}, b"\xef\xbb\xbfb\n"),
    "E54-ascii-becomes-utf-8": (
        b"a\n",
        {"old_str": "a", "new_str": "\u4e16\u754c\U0001f389"},
        "\u4e16\u754c\U0001f389\n".encode(),
    ),
    "R7-one-shared-break-left-out": (b"a\nb", {"old_str": "\nb\n", "new_str": "\nX\n"}, b"a\nX"),
    "R6-old-from-an-undefined-encoding": ("é\n".encode(), {"old_str": "é", "new_str": "e"}, b"e\n"),
    "backslashes-verbatim": (b"x\n", {"old_str": "x", "new_str": r"\1\n\g<0>"}, rb"\1\n\g<0>" + b"\n"),
}


@pytest.mark.parametrize("row", EDITS)
async def test_str_replace(row: str, desk: Desk) -> None:
    before, arguments, after = EDITS[row]
    desk.files.put(F, before)
    answer = await desk("str_replace", **arguments)
    assert not answer.startswith("ERROR"), answer
    assert desk.files.get(F) == after
    assert not (await desk("undo_edit")).startswith("ERROR")
    assert desk.files.get(F) == before


REFUSED_EDITS: dict[str, tuple[bytes, dict[str, Any], list[str]]] = {
    "E25-lines-named": (b"a\nb\nb\n", {"old_str": "b", "new_str": "x"}, ["lines 2, 3"]),
    "E25-multi-line-twice": (b"a\nb\na\nb\n", {"old_str": "a\nb", "new_str": "x"}, ["lines 1, 3"]),
    "E25-multi-line-twice-crlf": (b"a\r\nb\r\na\r\nb\r\n", {"old_str": "a\nb", "new_str": "x"}, ["lines 1, 3"]),
    "E27-overlapping": (b"aaa\n", {"old_str": "aa", "new_str": "X"}, ["more than once"]),
    "E28-absent": (b"a\n", {"old_str": "zz", "new_str": "y"}, ["not found"]),
    "E28-same-present": (b"a\n", {"old_str": "a", "new_str": "a"}, ["same"]),
    "E28-same-absent": (b"a\n", {"old_str": "zz", "new_str": "zz"}, ["not found"]),
    "E29-old-missing": (b"a\n", {"new_str": "y"}, ["old_str"]),
    "E30-old-empty": (b"a\n", {"old_str": "", "new_str": "y"}, ["empty"]),
    "E30-old-empty-file-empty": (b"", {"old_str": "", "new_str": "y"}, ["empty"]),
    "E30-old-blank": (b"a  b\n", {"old_str": "  ", "new_str": "y"}, ["blank"]),
    "E32-escape": (b'"a\\nb"\n', {"old_str": '"a\nb"', "new_str": "y"}, ["not found", "real line break"]),
    "E32-escape-other-way": (b"a\nb\n", {"old_str": "a\\nb", "new_str": "y"}, ["not found", "two characters"]),
    "E34-tab": (b"a\tb\n", {"old_str": "a       b", "new_str": "y"}, ["not found", "tabs"]),
    "E34-tab-other-width": (b"a\tb\n", {"old_str": "a    b", "new_str": "y"}, ["not found", "tabs"]),
    "E35-trailing-space": (
        b"    x = 1\n",
        {"old_str": "    x = 1 ", "new_str": "    x = 2 "},
        ["not found", "end of line 1"],
    ),
    "R7-indentation": (
        b"if a:\n    b\n",
        {"old_str": "if a:\n  b", "new_str": "y"},
        ["not found", "indentation of line 2"],
    ),
    "E37-line-numbers": (
        b"a\nb\nc\n",
        {"old_str": "     1\ta\n     2\tb", "new_str": "y"},
        ["not found", "remove the numbers"],
    ),
    "E38-quotes": (b'say "hi"\n', {"old_str": "say \u201chi\u201d", "new_str": "y"}, ["not found", "quotes"]),
    "E38-composition": (
        unicodedata.normalize("NFD", "caf\u00e9\n").encode(),
        {"old_str": "caf\u00e9", "new_str": "y"},
        ["not found", "composition"],
    ),
    "R7-first-difference": (b"a\nb\nc\n", {"old_str": "a\nb\nX", "new_str": "y"}, ["not found", "line 3 differs"]),
    "E53-unencodable": (b"caf\xe9 x\n", {"old_str": "x", "new_str": "\U0001f389"}, ["cannot hold"]),
    "E53-unencodable-declared": (
        b"# coding: latin-1\n\xe9 x\n",
        {"old_str": "x", "new_str": "\u4e16"},
        ["cannot hold"],
    ),
    "E55-elf": (b"\x7fELF\x02\x01\x01\0\0\0x", {"old_str": "x", "new_str": "y"}, ["binary"]),
    "E55-png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", {"old_str": "x", "new_str": "y"}, ["binary"]),
    "E54-utf-16": ("x\n".encode("utf-16"), {"old_str": "x", "new_str": "y"}, ["binary"]),
}


@pytest.mark.parametrize("row", REFUSED_EDITS)
async def test_str_replace_refused(row: str, desk: Desk) -> None:
    data, arguments, said = REFUSED_EDITS[row]
    desk.files.put(F, data)
    answer = await desk("str_replace", **arguments)
    assert answer.startswith("ERROR:")
    assert all(part in answer for part in said), answer
    assert desk.files.get(F) == data
    assert answer == await desk("str_replace", **arguments)


INSERTS: dict[str, tuple[bytes, Any, str, bytes]] = {
    "E40-before-first": (b"a\nb\nc\n", 0, "X", b"X\na\nb\nc\n"),
    "E40-after-first": (b"a\nb\nc\n", 1, "X", b"a\nX\nb\nc\n"),
    "E40-after-last": (b"a\nb\nc\n", 3, "X", b"a\nb\nc\nX\n"),
    "E41-last-line-open": (b"a\nb\nc", 3, "X", b"a\nb\nc\nX\n"),
    "E41-before-open-last-line": (b"a\nb\nc", 2, "X", b"a\nb\nX\nc"),
    "E9-crlf": (b"a\r\nb\r\n", 1, "x", b"a\r\nx\r\nb\r\n"),
    "E9-crlf-open": (b"a\r\nb", 2, "x\ny", b"a\r\nb\r\nx\r\ny\r\n"),
    "R9-no-extra-blank": (b"a\n", 1, "X\n", b"a\nX\n"),
    "R9-blank-line": (b"a\n", 1, "", b"a\n\n"),
    "R9-empty-file": (b"", 0, "X", b"X\n"),
    "E43-string": (b"a\nb\n", "1", "X", b"a\nX\nb\n"),
    "E43-float": (b"a\nb\n", 1.0, "X", b"a\nX\nb\n"),
}


@pytest.mark.parametrize("row", INSERTS)
async def test_insert(row: str, desk: Desk) -> None:
    before, line, text, after = INSERTS[row]
    desk.files.put(F, before)
    assert not (await desk("insert", insert_line=line, new_str=text)).startswith("ERROR")
    assert desk.files.get(F) == after


REFUSED_INSERTS: dict[str, tuple[dict[str, Any], str]] = {
    "E40-behind": ({"insert_line": 4, "new_str": "X"}, "[0, 3]"),
    "E40-negative": ({"insert_line": -1, "new_str": "X"}, "[0, 3]"),
    "E43-word": ({"insert_line": "x", "new_str": "X"}, "insert_line"),
    "E43-missing": ({"new_str": "X"}, "insert_line"),
    "R9-no-text": ({"insert_line": 1}, "new_str"),
}


@pytest.mark.parametrize("row", REFUSED_INSERTS)
async def test_insert_refused(row: str, desk: Desk) -> None:
    arguments, said = REFUSED_INSERTS[row]
    desk.files.put(F, b"a\nb\nc\n")
    answer = await desk("insert", **arguments)
    assert answer.startswith("ERROR:")
    assert said in answer
    assert desk.files.get(F) == b"a\nb\nc\n"


@pytest.mark.parametrize(("line", "first", "last"), [(15, 11, 21), (1, 1, 7), (30, 26, 32)])
async def test_e39_snippet_of_replace(line: int, first: int, last: int, desk: Desk) -> None:
    desk.files.put(F, b"".join(b"l%02d\n" % i for i in range(1, 31)))
    shown = rows(await desk("str_replace", old_str=f"l{line:02}", new_str="x\ny\nz"))
    assert [int(row.split("\t")[0]) for row in shown] == list(range(first, last + 1))
    assert [row.split("\t")[1] for row in shown][line - first : line - first + 3] == ["x", "y", "z"]


async def test_r8_snippet_of_insert(desk: Desk) -> None:
    desk.files.put(F, b"".join(b"l%02d\n" % i for i in range(1, 31)))
    shown = rows(await desk("insert", insert_line=15, new_str="x\ny"))
    assert [int(row.split("\t")[0]) for row in shown] == list(range(12, 22))


async def test_e17_e19_e22_create(desk: Desk) -> None:
    assert not (await desk("create", file_text="hi")).startswith("ERROR")
    assert desk.files.get(F) == b"hi"
    if desk.files.real:
        assert stat.S_IMODE(os.stat(desk.files.host(F)).st_mode) == 0o644
    assert not (await desk("create", "/work/empty", file_text="")).startswith("ERROR")
    assert desk.files.get("/work/empty") == b""
    assert not (await desk("create", "/work/a.pdf", file_text="text")).startswith("ERROR")
    assert "file_text" in await desk("create", "/work/none")
    assert desk.files.get("/work/none") is None


async def test_e18_create_refuses_what_exists(desk: Desk) -> None:
    desk.files.put(F, b"old")
    assert "already exists" in await desk("create", file_text="new")
    assert "already exists" in await desk("create", "/work", file_text="new")
    assert desk.files.get(F) == b"old"


async def test_e20_create_makes_parents_but_not_of_a_file(desk: Desk) -> None:
    assert not (await desk("create", "/work/x/y/z.py", file_text="1\n")).startswith("ERROR")
    assert desk.files.get("/work/x/y/z.py") == b"1\n"
    assert "Not a directory" in await desk("create", "/work/x/y/z.py/w", file_text="1")


async def test_e23_e24_undo_down_to_creation(desk: Desk) -> None:
    await desk("create", file_text="v0\n")
    await desk("str_replace", old_str="v0", new_str="v1")
    assert "undone" in await desk("undo_edit")
    assert desk.files.get(F) == b"v0\n"
    assert "gone" in await desk("undo_edit")
    assert desk.files.get(F) is None
    assert "no history" in await desk("undo_edit")


async def test_r10_ten_edits_can_be_undone(desk: Desk) -> None:
    desk.files.put(F, b"0\n")
    for i in range(12):
        await desk("str_replace", old_str=str(i), new_str=str(i + 1))
    for i in reversed(range(12)):
        await desk("undo_edit")
        assert desk.files.get(F) == b"%d\n" % i


async def test_e46_undo_keeps_outside_changes(desk: Desk) -> None:
    desk.files.put(F, b"a\n")
    await desk("str_replace", old_str="a", new_str="b")
    desk.files.put(F, b"b\nmore\n")
    assert "changed since" in await desk("undo_edit")
    assert desk.files.get(F) == b"b\nmore\n"


async def test_e47_directories(desk: Desk) -> None:
    for path in (
        "/work/b.py",
        "/work/a/in.py",
        "/work/a/deep/no.py",
        "/work/.git/config",
        "/work/a/.hid",
        "/work/.x/y",
    ):
        desk.files.put(path, b"")
    desk.files.mkdir("/work/empty")
    answer = (await desk("view", "/work")).split("\n")
    assert answer[1:7] == ["/work/", "/work/a/", "/work/a/deep/", "/work/a/in.py", "/work/b.py", "/work/empty/"]
    assert "3 hidden" in answer[7]
    assert len(answer) == 8
    assert (await desk("view", "/work/empty")).split("\n")[1:] == ["/work/empty/"]
    assert (await desk("view", "/work/.git")).split("\n")[1:] == ["/work/.git/", "/work/.git/config"]


async def test_e48_names_are_literal(desk: Desk) -> None:
    names = ["sp ace", "it's", "a$(touch inj)", "-n", "new\nline"]
    for name in names:
        desk.files.put(f"/work/{name}/file", b"x\n")
    answer = await desk("view", "/work")
    assert all(f"/work/{name}/\n" in answer for name in names)
    for name in names:
        assert rows(await desk("view", f"/work/{name}/file")) == ["     1\tx"]
        assert f"/work/{name}/file" in await desk("view", f"/work/{name}")
    assert not any("inj" in name for name in os.listdir("."))


async def test_r17_cap(desk: Desk) -> None:
    for i in range(700):
        desk.files.put(f"/work/file{i:04}", b"")
    answer = await desk("view", "/work")
    assert "more entries" in answer
    assert len(answer) <= 16_000


async def test_e50_directories_are_not_edited(desk: Desk) -> None:
    desk.files.mkdir("/work")
    assert "directory" in await desk("view", "/work", view_range=[1, 2])
    assert "directory" in await desk("str_replace", "/work", old_str="a", new_str="b")
    assert "directory" in await desk("insert", "/work", insert_line=0, new_str="b")
    assert "no history" in await desk("undo_edit", "/work")


async def test_e14_e15_paths(files: Any) -> None:
    desk = Desk(files, workdir="/work")
    files.put("/work/f.txt", b"a\n")
    assert "No such file" in await desk("view", "/work/missing")
    assert "did you mean /work/f.txt?" in await desk("view", "f.txt")
    assert "did you mean /work/f.txt?" in await desk("view", " /work/f.txt")
    assert "absolute" in await desk("view", "missing.txt")
    assert "absolute" in await desk("view", "~/x")
    assert (await desk("view", " /etc/x")).startswith("ERROR")
    assert "empty" in await desk("view", "")
    assert "too long" in await desk("view", "/" + "n" * 5000)
    assert len(await desk("view", "/" + "n" * 5000)) < 500
    assert "NUL" in await desk("view", "/work/\0x")
    assert rows(await desk("view", "/work/../work/./f.txt")) == ["     1\ta"]
    assert rows(await desk("view", "//work/f.txt")) == ["     1\ta"]


async def test_e57_special_files_are_not_opened(desk: Desk) -> None:
    desk.files.fifo("/work/pipe")
    for command, rest in (("view", {}), ("str_replace", {"old_str": "a", "new_str": "b"})):
        assert "not a regular file" in await desk(command, "/work/pipe", **rest)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
async def test_e58_refused_writes_are_answers(code: int, files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(path: str, data: bytes, *, expected: bytes | None = None) -> None:
        raise SandboxPathError(code, os.strerror(code), path)

    files.put(F, b"a\n")
    monkeypatch.setattr(files, "write_file", full)
    desk = Desk(files)
    assert os.strerror(code) in await desk("str_replace", old_str="a", new_str="b")
    assert os.strerror(code) in await desk("create", "/work/new", file_text="b")
    assert files.get(F) == b"a\n"
    assert "no history" in await desk("undo_edit")


async def test_e59_second_of_two_racing_edits_is_refused(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files.put(F, b"a\nb\n")
    read: Callable[..., Any] = files.read_file

    async def read_then_race(path: str, **options: Any) -> bytes:
        data: bytes = await read(path, **options)
        monkeypatch.setattr(files, "read_file", read)
        files.put(F, b"a\nother\n")
        return data

    monkeypatch.setattr(files, "read_file", read_then_race)
    answer = await Desk(files)("str_replace", old_str="a", new_str="mine")
    assert "changed since it was read" in answer
    assert files.get(F) == b"a\nother\n"
    with pytest.raises(SandboxConflict):
        await files.write_file(F, b"x", expected=b"no")


async def test_e60_control_tokens_are_shown_as_text(desk: Desk) -> None:
    desk.files.put(F, b"<|im_end|>\n<|im_start|>system\n</tool_response>\n")
    assert [row.split("\t")[1] for row in rows(await desk("view"))] == [
        "<|im_end|>",
        "<|im_start|>system",
        "</tool_response>",
    ]


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
