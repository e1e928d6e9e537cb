"""The conformance rows of the file editor, as data: what a call must do to files and what it must show.

One table for every editor that takes `command`, `path` and their parameters: the tests run it on ours, the benchmark
on others beside ours. Nothing depends on an editor's wording beyond a few words that an answer must contain. Rows
named E... are requirements that any such editor can be held to; the rest are rules of ours.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

FILE = "f.txt"
_NUMBERED = re.compile(r" *(\d+)\t(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call came to: the text for the model, and whether the editor says that it did nothing."""

    text: str
    refused: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One call and what is expected of its answer.

    `path` is below the work directory unless `raw`. `refused`: None allows both. `lines`: the numbered lines, exactly;
    `numbers`: only their numbers; `each`: the text of each numbered line, with its number for `{}`; `says`: patterns
    that the text must contain, case ignored; `race`: bytes that somebody else writes to the file between the editor's
    reading and its writing; `write`: bytes written to the file instead of a call.
    """

    command: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    path: str = FILE
    raw: bool = False
    refused: bool | None = False
    lines: tuple[str, ...] | None = None
    numbers: tuple[int, ...] | None = None
    each: str = ""
    says: tuple[str, ...] = ()
    race: bytes | None = None
    write: bytes | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Files (None: a directory), calls, and the files afterwards (None: there must be none).

    `modes`: mode bits of a file before and after; `fifo`: path of a FIFO to make; `limit`: no
    file can be made larger than so many bytes, as on a full disk; `decided`: the expectation is a
    choice where editors differ with reason, not a defect of those that choose otherwise.
    """

    name: str
    files: Mapping[str, bytes | None]
    steps: tuple[Step, ...]
    after: Mapping[str, bytes | None] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    fifo: str = ""
    limit: int = 0
    decided: bool = False


class Desk(Protocol):
    """An editor on files below a work directory of its own, fresh for each row."""

    async def call(self, step: Step) -> Answer:
        """Make one call, or write what the step says."""
        ...

    async def get(self, path: str) -> bytes | None:
        """Bytes of a file; None when there is none."""
        ...

    async def mode(self, path: str) -> int | None:
        """Mode bits of a file; None when this desk does not keep them."""
        ...


async def check_row(row: Row, desk: Desk) -> None:
    """Run a row on a desk prepared with its files. AssertionError saying what differs."""
    for number, step in enumerate(row.steps, 1):
        answer = await desk.call(step)
        if step.write is None:
            _check_answer(step, answer, f"call {number} ({step.command})")
    for path, expected in row.after.items():
        found = await desk.get(path)
        if found != expected:
            raise AssertionError(f"{path} holds {found!r:.200}, not {expected!r:.200}")
    for path, wanted in row.modes.items():
        mode = await desk.mode(path)
        if mode not in (None, wanted):
            raise AssertionError(f"{path} has mode {mode:o}, not {wanted:o}")


def _check_answer(step: Step, answer: Answer, call: str) -> None:
    if step.refused not in (None, answer.refused):
        raise AssertionError(f"{call} was {'refused' if answer.refused else 'carried out'}: {answer.text[:300]!r}")
    found = [match for match in map(_NUMBERED.fullmatch, answer.text.split("\n")) if match]
    if step.lines is not None and [f"{match[1]}\t{match[2]}" for match in found] != list(step.lines):
        raise AssertionError(f"{call} showed {answer.text[:500]!r}, not the lines {step.lines!r:.300}")
    if step.numbers is not None and [int(match[1]) for match in found] != list(step.numbers):
        raise AssertionError(f"{call} numbered {[match[1] for match in found]!r:.300}, not {step.numbers!r:.300}")
    if step.each and not (found and all(match[2] == step.each.format(match[1]) for match in found)):
        raise AssertionError(f"{call} gave a line the wrong number, or showed none")
    for pattern in step.says:
        if not re.search(pattern, answer.text, re.IGNORECASE | re.DOTALL):
            raise AssertionError(f"{call} does not say {pattern!r}: {answer.text[:500]!r}")


def _row(name: str, data: bytes | Mapping[str, bytes | None] | None, *steps: Step, **rest: Any) -> Row:
    files = data if isinstance(data, Mapping) else {} if data is None else {FILE: data}
    return Row(name, files, steps, **rest)


def _view(view_range: Any = None, **expect: Any) -> Step:
    return Step("view", {} if view_range is None else {"view_range": view_range}, **expect)


def _replace(old: str | None, new: str | None, **expect: Any) -> Step:
    given = {"old_str": old, "new_str": new}
    return Step("str_replace", {name: text for name, text in given.items() if text is not None}, **expect)


def _insert(line: Any, text: str | None, **expect: Any) -> Step:
    given = {"insert_line": line, "new_str": text}
    return Step("insert", {name: value for name, value in given.items() if value is not None}, **expect)


def _create(text: str | None = None, **expect: Any) -> Step:
    return Step("create", {} if text is None else {"file_text": text}, **expect)


def _undo(**expect: Any) -> Step:
    return Step("undo_edit", **expect)


def _write(data: bytes) -> Step:
    return Step("", write=data)


def _shows(name: str, data: bytes, view_range: Any, *lines: str, **rest: Any) -> Row:
    return _row(name, data, _view(view_range, lines=lines), after={FILE: data}, **rest)


def _edits(name: str, before: bytes, step: Step, after: bytes, **rest: Any) -> Row:
    return _row(name, before, step, after={FILE: after}, **rest)


def _refuses(name: str, data: bytes, step: Step, *says: str, **rest: Any) -> Row:
    refusing = Step(step.command, step.arguments, refused=True, says=says)
    return _row(name, data, refusing, after={FILE: data}, **rest)


ABC = b"a\nb\nc\n"
_MANY = b"".join(b"line %d of many\n" % number for number in range(1, 3001))
_THIRTY = b"".join(b"l%02d\n" % number for number in range(1, 31))
_LATIN = b"caf\xe9 one\n"
_NOT_FOUND = r"not found|did not appear|no (match|occurrence)"
_NAMES = ("sp ace", "it's", "a$(touch inj)", "-n", "new\nline")
_ELF, _PNG = b"\x7fELF\x02\x01\x01" + bytes(64), b"\x89PNG\r\n\x1a\n" + bytes(64)


def _views() -> Iterable[Row]:
    abc = ("1\ta", "2\tb", "3\tc")
    yield _shows("E1 final line break", ABC, None, *abc)
    yield _shows("E1 no final line break", b"a\nb\nc", None, *abc)
    yield _row("E2 empty file", b"", _view(lines=()))
    yield _shows("E2 one empty line", b"\n", None, "1\t")
    yield _shows("E3 one line", ABC, [2, 2], "2\tb")
    yield _shows("E3 to the end", ABC, [2, -1], "2\tb", "3\tc")
    yield _row("E4 end behind the last line", ABC, _view([2, 10], lines=abc[1:], says=(r"\b3 lines",)))
    for name, wrong in {"start behind the end": [4, 5], "zero": [0, 2], "reversed": [3, 2], "-2": [1, -2]}.items():
        yield _refuses(f"E4 {name}", ABC, _view(wrong), "view_range")
    yield _shows("E6 numbers as text", ABC, ["1", "2"], *abc[:2], decided=True)
    yield _shows("E6 range as text", ABC, "[1, 2]", *abc[:2], decided=True)
    yield _shows("E6 numbers as floats", ABC, [1.0, 2.0], *abc[:2], decided=True)
    yield _refuses("E6 boolean", ABC, _view([True, 2]), "view_range", decided=True)
    yield _row("E7 empty range", b"a\nb\n", _view([], says=("1\ta\n.*2\tb",)))
    yield _row("E7 range of an empty file", b"", _view([1, 1], lines=(), says=("empty",)))
    yield _shows("E9 carriage returns not shown", b"a\r\nb\r\n", [1, 2], "1\ta", "2\tb")
    cut = _view(each="line {} of many", says=(r"\b3000\b",))
    yield _row("E12 numbers up to the cut", _MANY, cut, after={FILE: _MANY})
    exact = tuple(f"{number}\tline {number} of many" for number in (2900, 2901, 2902))
    yield _shows("E12 range far in", _MANY, [2900, 2902], *exact)
    yield _shows("R1 other separators are text", "a\x0cb\u2028c\x85d\n".encode(), [1, 1], "1\ta\x0cb\u2028c\x85d")
    yield _shows("R12 tabs kept in the view", b"\tx\n", None, "1\t\tx")
    yield _shows("R13 declared encoding", b"# coding: latin-1\ncaf\xe9\n", [2, 2], "2\tcaf\u00e9")
    yield _refuses("R4 one number", ABC, _view([1]), "view_range")
    yield _refuses("R4 three numbers", ABC, _view([1, 2, 3]), "view_range")
    yield _refuses("R4 words", ABC, _view("first to last"), "view_range")
    yield _row("E60 control tokens are text", b"<|im_end|>\n", _view([1, 1], lines=("1\t<|im_end|>",)))


def _paths() -> Iterable[Row]:
    there = {FILE: b"a\n"}
    yield _row("E14 missing", {}, _view(path="missing", refused=True))
    yield _row("E14 relative", there, _view(path=FILE, raw=True, refused=True, says=("absolute", r"/f\.txt")))
    yield _row("E14 home", there, _view(path="~/x", raw=True, refused=True))
    yield _row("E14 leading space", there, _view(path=" /etc/hosts", raw=True, refused=True))
    yield _row("E15 long name", {}, _view(path="n" * 5000, refused=True))
    yield _row("E15 NUL", {}, _view(path="a\0b", refused=True))
    yield _row("R18 dots are resolved", there, _view(path="x/../f.txt", lines=("1\ta",)))


def _creates() -> Iterable[Row]:
    yield _row("E17 bytes and mode", {}, _create("hi"), after={FILE: b"hi"}, modes={FILE: 0o644})
    yield _row("E18 existing file", b"old", _create("new", refused=True), after={FILE: b"old"})
    yield _row("E18 existing directory", {"d": None, "d/x": b"1"}, _create("new", path="d", refused=True))
    yield _row("E19 no text", {}, _create(refused=True), after={FILE: None})
    yield _row("E19 empty text", {}, _create(""), after={FILE: b""})
    yield _row("E20 parents are made", {}, _create("1\n", path="x/y/z.py"), after={"x/y/z.py": b"1\n"}, decided=True)
    yield _row("E20 below a file", b"a", _create("1", path=f"{FILE}/w", refused=True), after={FILE: b"a"})
    yield _row("E22 text named .pdf", {}, _create("text", path="a.pdf"), after={"a.pdf": b"text"})
    yield _row("E23 undo of create", {}, _create("v0\n"), _undo(), after={FILE: None})
    undone = (_undo(), _undo(), _undo(refused=True))
    yield _row("E24 undo to the start", {}, _create("v0\n"), _replace("v0", "v1"), *undone, after={FILE: None})
    yield _edits("E54 ASCII becomes UTF-8", b"a\n", _replace("a", "\u4e16\U0001f389"), "\u4e16\U0001f389\n".encode())


def _replaces() -> Iterable[Row]:
    yield _edits("E9 CRLF replace", b"a\r\nb\r\n", _replace("b", "X"), b"a\r\nX\r\n")
    yield _edits("E10 LF matches CRLF", b"a\r\nb\r\nc\r\n", _replace("a\nb", "a\nB"), b"a\r\nB\r\nc\r\n")
    yield _edits("E29 new missing deletes", b"a\nb\n", _replace("b\n", None), b"a\n")
    yield _edits("E33 tabs kept", b"\tx\n\ty\n", _replace("x", "z"), b"\tz\n\ty\n")
    yield _edits("E51 latin-1, ASCII part", _LATIN, _replace("one", "two"), b"caf\xe9 two\n")
    yield _row("E51 latin-1, view", _LATIN, _view(says=("1\tcaf",)))
    yield _edits("E54 byte order mark kept", b"\xef\xbb\xbfa\n", _replace("a", "b"), b"\xef\xbb\xbfb\n")
    mixed = b"a\r\nb\nc\r\nd\r\n"
    yield _edits("R11 untouched lines", mixed, _replace("d", "D\nE"), b"a\r\nb\nc\r\nD\r\nE\r\n")
    local = b"a\nb\nc\r\nd\r\ne\r\n"
    yield _edits("R11 local style", local, _replace("a\nb", "A\nB"), b"A\nB\nc\r\nd\r\ne\r\n")
    yield _edits("R11 CRLF in old", b"a\nb\n", _replace("a\r\nb", "ab"), b"ab\n")
    coded = b"# coding: latin-1\n"
    yield _edits("R13 encodable", coded + b"caf\xe9\n", _replace("caf\u00e9", "th\u00e9"), coded + b"th\xe9\n")
    yield _edits("R7 one shared break left out", b"a\nb", _replace("\nb\n", "\nX\n"), b"a\nX")
    yield _edits("R6 backslashes verbatim", b"x\n", _replace("x", r"\1\n\g<0>"), rb"\1\n\g<0>" + b"\n")
    for line, first, last in ((15, 11, 21), (1, 1, 7), (30, 26, 32)):
        step = _replace(f"l{line:02}", "x\ny\nz", numbers=tuple(range(first, last + 1)))
        yield _row(f"E39 snippet at line {line}", _THIRTY, step, decided=True)


def _refusals() -> Iterable[Row]:
    yield _refuses("E25 lines named", b"a\nb\nb\n", _replace("b", "x"), r"\b2\b.*\b3\b")
    yield _refuses("E25 multi-line twice", b"a\nb\na\nb\n", _replace("a\nb", "x"), r"\b1\b.*\b3\b")
    yield _refuses("E25 in CRLF", b"a\r\nb\r\na\r\nb\r\n", _replace("a\nb", "x"), r"\b1\b.*\b3\b")
    yield _refuses("E27 overlapping", b"aaa\n", _replace("aa", "X"), "more than once|multiple", decided=True)
    yield _refuses("E28 absent", b"a\n", _replace("zz", "y"), _NOT_FOUND)
    yield _refuses("E28 equal and present", b"a\n", _replace("a", "a"), "same|different")
    yield _refuses("E28 equal and absent", b"a\n", _replace("zz", "zz"), _NOT_FOUND)
    yield _refuses("E29 old missing", b"a\n", _replace(None, "y"), "old_str")
    yield _refuses("E30 old empty", b"a\n", _replace("", "y"), "empty")
    yield _refuses("E30 old empty, file empty", b"", _replace("", "y"), "empty")
    yield _refuses("E30 old blank", b"a  b\n", _replace("  ", "y"), "blank|white ?space|empty")
    yield _refuses("E32 escape", b'"a\\nb"\n', _replace('"a\nb"', "y"), _NOT_FOUND, "real line break|escape")
    yield _refuses("E32 other way", b"a\nb\n", _replace("a\\nb", "y"), _NOT_FOUND, "two characters|escape")
    yield _refuses("E34 tab", b"a\tb\n", _replace("a       b", "y"), _NOT_FOUND, r"\btabs?\b")
    yield _refuses("E34 tab of another width", b"a\tb\n", _replace("a    b", "y"), _NOT_FOUND, r"\btabs?\b")
    tail = _replace("    x = 1 ", "    x = 2 ")
    yield _refuses("E35 trailing space", b"    x = 1\n", tail, _NOT_FOUND, "trailing|end of line 1")
    indent = _replace("if a:\n  b", "y")
    yield _refuses("R7 indentation", b"if a:\n    b\n", indent, _NOT_FOUND, "indentation of line 2")
    numbered = _replace("     1\ta\n     2\tb", "y")
    yield _refuses("E37 line numbers copied", ABC, numbered, _NOT_FOUND, "remove.*number|line number")
    curly = _replace("say \u201chi\u201d", "y")
    yield _refuses("E38 quotes", b'say "hi"\n', curly, _NOT_FOUND, "quote")
    composed = unicodedata.normalize("NFD", "caf\u00e9\n").encode()
    yield _refuses("E38 composition", composed, _replace("caf\u00e9", "y"), _NOT_FOUND, "composition|unicode|normali")
    yield _refuses("R7 first difference", ABC, _replace("a\nb\nX", "y"), _NOT_FOUND, "line 3 differs")
    yield _refuses("E53 not encodable", b"caf\xe9 x\n", _replace("x", "\U0001f389"))
    declared = b"# coding: latin-1\n\xe9 x\n"
    yield _refuses("E53 not encodable, declared", declared, _replace("x", "\u4e16"))
    wide = "x\n".encode("utf-16")
    yield _row("E54 UTF-16 view", wide, _view(refused=None, says=("binary|1\tx",)), after={FILE: wide})
    yield _refuses("R13 UTF-16 replace", wide, _replace("x", "y"))
    yield _refuses("E55 ELF, view", _ELF, _view(), "binary")
    yield _refuses("E55 ELF, replace", _ELF, _replace("ELF", "y"), "binary")
    yield _refuses("E55 PNG, replace", _PNG, _replace("PNG", "y"), "binary")
    yield _row("E57 FIFO, view", {}, _view(path="p", refused=True), fifo="p")
    yield _row("E57 FIFO, replace", {}, _replace("a", "b", path="p", refused=True), fifo="p")
    yield _row("E57 /dev/zero", {}, _view(path="/dev/zero", raw=True, refused=True))
    full, kept = _replace("x\n", "y" * 1_200_000, refused=True), b"a" * 4000 + b"x\n"
    yield _row("E58 no room", kept, full, after={FILE: kept}, limit=1 << 20)
    yield _row("E59 race", b"a\nb\n", _replace("a", "X", race=b"a\no\n", refused=True), after={FILE: b"a\no\n"})


def _inserts() -> Iterable[Row]:
    yield _edits("E9 CRLF insert", b"a\r\nb\r\n", _insert(1, "x"), b"a\r\nx\r\nb\r\n")
    yield _edits("E40 before the first", ABC, _insert(0, "X"), b"X\na\nb\nc\n")
    yield _edits("E40 after the first", ABC, _insert(1, "X"), b"a\nX\nb\nc\n")
    yield _edits("E40 after the last", ABC, _insert(3, "X"), b"a\nb\nc\nX\n")
    yield _refuses("E40 behind", ABC, _insert(4, "X"), r"\[0, 3\]")
    yield _refuses("E40 negative", ABC, _insert(-1, "X"))
    yield _edits("E41 after an open last line", b"a\nb\nc", _insert(3, "X"), b"a\nb\nc\nX\n")
    yield _edits("E41 before an open last line", b"a\nb\nc", _insert(2, "X"), b"a\nb\nX\nc")
    yield _edits("E43 text", b"a\nb\n", _insert("1", "X"), b"a\nX\nb\n", decided=True)
    yield _edits("E43 float", b"a\nb\n", _insert(1.0, "X"), b"a\nX\nb\n", decided=True)
    yield _refuses("E43 word", ABC, _insert("x", "X"), "insert_line")
    yield _refuses("E43 missing", ABC, _insert(None, "X"), "insert_line")
    yield _edits("R9 CRLF open", b"a\r\nb", _insert(2, "x\ny"), b"a\r\nb\r\nx\r\ny\r\n")
    yield _edits("R9 no extra blank line", b"a\n", _insert(1, "X\n"), b"a\nX\n")
    yield _edits("R9 blank line", b"a\n", _insert(1, ""), b"a\n\n")
    yield _edits("R9 empty file", b"", _insert(0, "X"), b"X\n")
    yield _refuses("R9 no text", ABC, _insert(1, None), "new_str")
    yield _row("R8 snippet of insert", _THIRTY, _insert(15, "x\ny", numbers=tuple(range(12, 22))))
    script = b"#!/bin/sh\na\n"
    yield _edits("E44 mode after replace", script, _replace("a", "b"), b"#!/bin/sh\nb\n", modes={FILE: 0o755})
    yield _edits("E44 mode after insert", script, _insert(2, "b"), script + b"b\n", modes={FILE: 0o755})


def _directories() -> Iterable[Row]:
    more = _write(b"b\nmore\n")
    yield _row("E46 undo after an outside change", b"a\n", _replace("a", "b"), more, _undo(refused=True))
    tree: dict[str, bytes | None] = {
        "b.py": b"",
        "a/in.py": b"",
        "a/deep/no.py": b"",
        ".git/config": b"",
        "empty": None,
    }
    listed = (r"/a/?\n.*/a/deep/?\n.*/a/in\.py\n.*/b\.py\n.*/empty/?", r"\b1 hidden")
    yield _row("E47 two levels, sorted", tree, Step("view", path=".", says=(*listed, r"^(?!.*no\.py)(?!.*config)")))
    yield _row("E47 empty directory", tree, Step("view", path="empty", says=(r"/empty/?\s*$",)))
    yield _row("E47 hidden root", tree, Step("view", path=".git", says=(r"\.git/config",)))
    for name in _NAMES:
        there = {f"{name}/file": b"x\n"}
        steps = Step("view", path=name, says=("/file",)), Step("view", path=f"{name}/file", says=("1\tx",))
        yield _row(f"E48 directory named {name!a}", there, *steps, after={"inj": None})
    yield _row("E50 range of a directory", tree, _view([1, 2], path="a", refused=True))
    yield _row("E50 edit of a directory", tree, _replace("a", "b", path="a", refused=True))
    yield _row("E50 undo of a directory", tree, _undo(path="a", refused=True))


def _all() -> tuple[Row, ...]:
    groups: tuple[Callable[[], Iterable[Row]], ...] = (
        _views,
        _paths,
        _creates,
        _replaces,
        _refusals,
        _inserts,
        _directories,
    )
    return tuple(row for group in groups for row in group())


ROWS = _all()
"""All rows, in the order of the table. Names are unique."""
