r"""Calls written as tags: what CodeAct and Qwen3-Coder share.

A call is `<function=N>`, `<parameter=K>V</parameter>` for each argument, `</function>`.

Values are raw text, so a value may itself contain tags. A closing tag counts only where structure allows:
`</parameter>` must be followed by the next parameter or by a `</function>` after which no closing tag is left over.
Tags that nest properly inside a value are paired first. Where two readings remain, the text is refused.
Exactly one line break is stripped at each end of a value.

`<parameter=K json>` holds the value as a JSON string with `<` written as `\u003c`: the way to write any text at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from skyenv.formats.contract import CUT_OFF, MAX_CALLS, Written, refuse_foreign, reject, too_many

_TAG = re.compile(
    r"<(?:function=(?P<fopen>[^\s<>=/]+)>"
    r"|(?P<fclose>/function>)"
    r"|parameter=(?P<popen>[^\s<>=/]+)(?: json)?>"
    r"|(?P<pclose>/parameter>)"
    r"|(?P<think>think>)|(?P<unthink>/think>))"
)
_LOOKALIKE = re.compile(r"<\s*(?:(?i:function|parameter)\s*=|/\s*(?i:function|parameter)\s*>)")
_WRAPPER = re.compile(r"\n?</?tool_call>\n?")
_NEEDS_JSON = re.compile(r"</?(?:function|parameter|think|tool_call)\b|\r\Z")
_CLOSE = "</function>"
_JSON = " json>"
_MOST_TAGS = 16384  # values with more are written in the JSON form, in which they hold none


class TaggedText:
    """One pass over the tags of one text."""

    def __init__(self, text: str, *, cut: bool, shape: str) -> None:
        self.repairs = 0
        self._text, self._cut, self._shape = text, cut, shape
        self._tags = list(islice(_TAG.finditer(text), _MOST_TAGS + 1))
        self._kinds = [tag.lastgroup for tag in self._tags]
        self._partner = _pair_parameters(self._kinds)
        self._prose: list[str] = []

    def content(self) -> str:
        """The visible text read so far, without calls and wrappers."""
        visible = "".join(self._prose)
        return (_WRAPPER.sub("\n", visible) if "tool_call>" in visible else visible).strip()

    def read(self, thinking_open: bool) -> list[Written]:
        """Walk the top level: prose, thinking, calls. Raises Rejected."""
        if len(self._tags) > _MOST_TAGS:
            raise reject(f"The answer holds more than {_MOST_TAGS} tags.", self._shape)
        calls: list[Written] = []
        at, position = self._after_thinking(0) if thinking_open else (0, 0)
        while at < len(self._tags):
            tag, kind = self._tags[at], self._kinds[at]
            self._prose.append(self._text[position : tag.start()])
            if kind == "fopen":
                call, at, position = self._call(at)
                calls.append(call)
                if len(calls) > MAX_CALLS:
                    raise too_many()
            elif kind == "think":
                at, position = self._after_thinking(at)
            elif kind == "unthink" and not calls:
                self._prose.clear()
                at, position = at + 1, tag.end()
            else:
                raise reject(f"{tag[0]} stands where no such tag can.", self._shape)
        self._prose.append(self._text[position:])
        self._check_prose("".join(self._prose))
        return calls

    def _check_prose(self, visible: str) -> None:
        lowered = visible.lower()
        if ("function" in lowered or "parameter" in lowered) and _LOOKALIKE.search(visible):
            raise (
                reject(CUT_OFF) if self._cut else reject("A tag of the tool call is not written exactly.", self._shape)
            )
        refuse_foreign(visible, self._shape)

    def _after_thinking(self, at: int) -> tuple[int, int]:
        """Index of the tag and position in the text behind the next `</think>`; the end when there is none."""
        for end in range(at, len(self._tags)):
            if self._kinds[end] == "unthink":
                return end + 1, self._tags[end].end()
        return len(self._tags), len(self._text)

    def _call(self, at: int) -> tuple[Written, int, int]:
        """Read the call that opens at tag `at`; returns it and where to go on."""
        name, position = self._tags[at]["fopen"], self._tags[at].end()
        arguments: dict[str, Any] = {}
        at += 1
        while True:
            if at >= len(self._tags):
                return Written(name, arguments), at, self._accept_unclosed(position)
            tag, kind = self._tags[at], self._kinds[at]
            if self._between(position, at):
                raise reject(f"Text stands between the tags of the call of '{name[:80]}'.", self._shape)
            if kind == "fclose":
                return Written(name, arguments), at + 1, tag.end()
            if kind != "popen":
                raise reject(f"{tag[0][:80]} stands where no such tag can.", self._shape)
            if tag["popen"] in arguments:
                raise reject(f"Parameter '{tag['popen'][:80]}' is given twice.")
            end = self._value_end(at)
            arguments[tag["popen"]] = _value(self._text[tag.end() : self._tags[end].start()], tag)
            at, position = end + 1, self._tags[end].end()

    def _accept_unclosed(self, position: int) -> int:
        """The text ends behind the last parameter: a missing `</function>` is fine unless more may have followed."""
        if self._cut:
            raise reject(CUT_OFF)
        if not self._begins_close(position):
            raise reject("The call has no </function>.", self._shape)
        return len(self._text)

    def _begins_close(self, position: int) -> bool:
        """Whether what is left of the text is the beginning of `</function>`, if only the empty one."""
        return _CLOSE.startswith(self._text[position:].strip())

    def _between(self, position: int, at: int) -> bool:
        """Whether anything but white space stands between a position and tag `at`."""
        gap = self._text[position : self._tags[at].start()]
        return bool(gap) and not gap.isspace()

    def _value_end(self, at: int) -> int:
        """Index of the `</parameter>` that ends the value opened at tag `at`. Raises Rejected."""
        paired = self._partner.get(at)
        if paired is not None and self._is_structural(paired):
            return paired
        name = self._tags[at]["popen"][:80]
        for end in range(at + 1, len(self._tags)):
            if self._kinds[end] == "pclose" and self._is_structural(end):
                if any(self._opens_call(inner) for inner in range(at + 1, end)):
                    raise reject(f"Parameter '{name}' has no unambiguous end.", self._shape)
                return end
        if self._cut:
            raise reject(CUT_OFF)
        raise reject(f"Parameter '{name}' is not closed, or closing tags are left over behind its call.", self._shape)

    def _is_structural(self, at: int) -> bool:
        """Whether the `</parameter>` at tag `at` stands where the structure of a call allows it."""
        kinds, following = self._kinds, at + 1
        if following == len(kinds):
            return self._begins_close(self._tags[at].end())
        if kinds[following] == "fclose":
            last = following + 1 == len(kinds) or kinds[following + 1] in ("fopen", "think", "unthink")
            return last and not self._between(self._tags[at].end(), following)
        return kinds[following] == "popen" and not self._between(self._tags[at].end(), following)

    def _opens_call(self, at: int) -> bool:
        if self._kinds[at] != "fopen" or self._kinds[at + 1] != "popen":
            return False
        return not self._between(self._tags[at].end(), at + 1)


def _pair_parameters(kinds: Sequence[str | None]) -> dict[int, int]:
    """Pair opening and closing parameter tags as brackets are paired."""
    stack: list[int] = []
    pairs: dict[int, int] = {}
    for at, kind in enumerate(kinds):
        if kind == "popen":
            stack.append(at)
        elif kind == "pclose" and stack:
            pairs[stack.pop()] = at
    return pairs


def _value(raw: str, tag: re.Match[str]) -> Any:
    if not tag[0].endswith(_JSON):
        raw = raw.removeprefix("\n") if not raw.startswith("\r\n") else raw[2:]
        return raw.removesuffix("\r\n") if raw.endswith("\r\n") else raw.removesuffix("\n")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise reject(f"Parameter '{tag['popen'][:80]}' is marked json, but its value is not one JSON string.")
    return value


def write_parameter(name: str, value: Any, *, wrap: bool | None = None) -> str:
    """One parameter that is read back as it was; `wrap` puts a line break at both ends (None: where needed)."""
    if not isinstance(value, str):
        text, marked = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"), ""
    elif _NEEDS_JSON.search(value):
        text, marked = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"), " json"
    else:
        text, marked = value, ""
    around = "\n" if ("\n" in text if wrap is None else wrap) else ""
    return f"<parameter={name}{marked}>{around}{text}{around}</parameter>\n"
