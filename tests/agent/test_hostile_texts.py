"""Ten thousand hostile texts for each format: parsing never raises, is all or nothing, and takes linear time.

The texts are put together from what models, repositories and attackers write: whole, cut and damaged calls of every
format, control tokens, thinking, JSON pieces, odd characters and long runs.
"""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any, cast

import pytest

from skyenv import formats
from skyenv.formats.contract import NativeFormat, Parsed
from skyenv.tools import default_tools
from skyenv.tools.schema import check_arguments
from skyenv.types import FinishReason, NativeCall, ToolCall, ToolSpec

PLAN = ToolSpec(
    "plan",
    "Set a plan.",
    {"type": "object", "properties": {"steps": {"type": "array"}, "meta": {"type": "object"}, "count": {}}},
)
TOOLS = (*(tool.spec for tool in default_tools()), PLAN)
SPECS = {spec.name: spec for spec in TOOLS}
REASONS: tuple[FinishReason, ...] = ("stop", "stop", "stop", "length", "abort")
TEXTS = 10_000

TAGS = [
    "<function=execute_bash>",
    "<function=plan>\n",
    "</function>",
    "<parameter=command>",
    "<parameter=steps>\n",
    "<parameter=command json>",
    "</parameter>",
    "<tool_call>\n",
    "\n</tool_call>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
]
HALF_TAGS = ["<", "</", "<func", "function=", "<function=", "<parameter=", "</param", "< function = x>", "<tool_", "|>"]
CONTROL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[/INST]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|start|>assistant",
    "<|channel|>commentary to=functions.execute_bash ",
    "<|channel|>analysis",
    "<|constrain|>json",
    "<|message|>",
    "<|call|>",
    "<|end|>",
]
JSON = [
    '{"name": "execute_bash", "arguments": ',
    '{"name": "plan", "parameters": {"meta": ',
    '{"tool_calls": [{"function": {"name": "finish"',
    '{"command": "ls"}',
    '"\\ud800"',
    '{"\\udfff": 1}',
    '"\\',
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ": ",
    ";",
    "NaN",
    "-1e999",
    "9" * 30,
    "null",
    "```json\n",
    "```",
    "(1, 2",
]
CHARACTERS = [
    "\x00",
    "\r",
    "\n",
    " ",
    "\t",
    "\v",
    "\u2028",
    "\u00e9",
    "\u4e16",
    "\U0001f389",
    "\ufeff",
    "\u202e",
    "\x1b[",
]
WORDS = [
    "execute_bash",
    "finish",
    "plan",
    "ls -la",
    "x",
    "I look.\n",
    "to=functions.x",
    "function",
    "parameter",
    "name",
]
FRAGMENTS = [*TAGS, *HALF_TAGS, *CONTROL, *JSON, *CHARACTERS, *WORDS]


def soup(chance: random.Random, most: int) -> str:
    return "".join(chance.choices(FRAGMENTS, k=chance.randrange(most)))


def chance_call(chance: random.Random, name: str) -> str:
    """A whole call, one time in three of any format; its value is hostile as often as not."""
    value = soup(chance, 6) if chance.random() < 0.5 else "ls"
    call = ToolCall("execute_bash", {"command": value})
    if chance.random() < 0.3:
        call = ToolCall("plan", {"steps": [value, 1, None], "meta": {value: [value]}})
    return formats.get(name if chance.random() < 0.67 else chance.choice(formats.names())).render_call(call)


def damaged(chance: random.Random, text: str) -> str:
    """The text cut off, with a piece cut out, with a fragment put in, or with a character changed."""
    at = chance.randrange(len(text) + 1)
    return chance.choice(
        (
            text[:at],
            text[at:],
            text[:at] + text[at + chance.randrange(1, 20) :],
            text[:at] + chance.choice(FRAGMENTS) + text[at:],
            text[:at] + chance.choice(FRAGMENTS)[0] + text[at + 1 :],
        )
    )


@cache
def hostile_texts(name: str) -> tuple[str, ...]:
    """Texts for one format, the same in every run."""
    chance = random.Random(name)
    return tuple(hostile_text(chance, name) for _ in range(TEXTS))


def hostile_text(chance: random.Random, name: str) -> str:
    kind = chance.random()
    if kind < 0.4:
        return soup(chance, 16)
    if kind < 0.6:
        return soup(chance, 4) + chance_call(chance, name) + soup(chance, 4)
    if kind < 0.97:
        text = chance_call(chance, name) + (chance_call(chance, name) if chance.random() < 0.3 else "")
        return soup(chance, 3) + damaged(chance, text)
    return soup(chance, 6) + chance.choice(FRAGMENTS) * chance.randrange(50, 400) + soup(chance, 6)


def is_unicode(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def check(text: str, parsed: Parsed) -> None:
    """All or nothing, and what comes out is valid: calls pass their schema unchanged, all text can be encoded."""
    assert not (parsed.calls and parsed.error is not None), text
    for call in parsed.calls:
        assert check_arguments(SPECS[call.name], call.arguments) == call.arguments, text
    written = [json.dumps([call.id, dict(call.arguments)], ensure_ascii=False) for call in parsed.calls]
    assert is_unicode("".join([*written, parsed.error or "", parsed.content])), text


@pytest.mark.parametrize("name", formats.names())
def test_ten_thousand_texts(name: str) -> None:
    form, chance = formats.get(name), random.Random(name)
    with_calls = with_error = 0
    for number, text in enumerate(hostile_texts(name)):
        reason, thinking = chance.choice(REASONS), chance.random() < 0.1
        parsed = form.parse(text, TOOLS, finish_reason=reason, thinking_open=thinking)
        check(text, parsed)
        if number % 20 == 0:
            assert form.parse(text, TOOLS, finish_reason=reason, thinking_open=thinking) == parsed, text
        with_calls += bool(parsed.calls)
        with_error += parsed.error is not None
    assert with_calls > TEXTS // 100
    assert with_error > TEXTS // 4


def test_ten_thousand_native_calls() -> None:
    """Names, ids and arguments as a server may report them, hostile text beside them."""
    form, chance = formats.get("openai"), random.Random(21)
    assert isinstance(form, NativeFormat)
    with_calls = 0
    for text in hostile_texts(form.name):
        name = "execute_bash" if chance.random() < 0.7 else text[:20]
        arguments = chance.choice(
            (text, {"command": text}, json.dumps({"command": text}), '{"command": "' + text, [text])
        )
        content = "" if chance.random() < 0.7 else chance.choice(hostile_texts(form.name))
        call = NativeCall(chance.choice(("c1", "", text[:9])), name, arguments)
        parsed = form.parse_native(content, [call], TOOLS, finish_reason=chance.choice(REASONS))
        check(text, parsed)
        with_calls += bool(parsed.calls)
    assert with_calls > TEXTS // 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"meta": {"\\ud800": 1}}', "without lone surrogates"),
        ('{"steps": ["a", ["\\udfff"]]}', "without lone surrogates"),
        ('{"\\ud800": 1}', "no parameter named '\\ud800'"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "openai"])
def test_surrogates_that_no_tokenizer_encodes_are_refused(name: str, arguments: str, said: str) -> None:
    whole = formats.get(name).render_call(ToolCall("plan", {"count": 0}))
    escaped = json.dumps(arguments) if name == "openai" else arguments
    text = whole.replace(json.dumps('{"count": 0}') if name == "openai" else '{"count": 0}', escaped)
    parsed = formats.get(name).parse(text, TOOLS)
    check(text, parsed)
    assert said in str(parsed.error)


GROWTH, BASE = 16, 4_000
OPENINGS = [
    "",
    "<think>",
    "<function=execute_bash>\n<parameter=command>",
    '<tool_call>\n{"name": "execute_bash", "arguments": {"command": "',
    '[TOOL_CALLS][{"name": "plan", "arguments": {"steps": [',
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>plan\n```json\n",
    "<|channel|>commentary to=functions.plan<|message|>",
    '{"name": "plan", "parameters": {"meta": {',
    '{"tool_calls": [',
]


def seconds(form: formats.Format, text: str) -> float:
    begin = time.thread_time()
    form.parse(text, TOOLS)
    return time.thread_time() - begin


class Square:
    """A format that looks through the rest of the text from every 64th character on."""

    name = "square"

    def parse(self, text: str, tools: Any) -> None:
        for position in range(0, len(text), 64):
            text.find("\x01\x02", position)


def grows_linearly(form: formats.Format, opening: str, unit: str) -> bool:
    """Whether text of sixteen times the size takes less than forty times the processor's time: a square takes 256.

    The least of several measurements counts: a burden on the machine only lifts them.
    """
    small, large = (opening + unit * (size // len(unit)) for size in (BASE, BASE * GROWTH))
    allowed = 40 * min(seconds(form, small) for _ in range(5)) + 0.002
    return any(seconds(form, large) < allowed for _ in range(10))


def test_a_square_is_not_linear() -> None:
    assert not grows_linearly(cast(formats.Format, Square()), "", "x")


@pytest.mark.parametrize("name", formats.names())
def test_time_is_linear_in_every_fragment(name: str) -> None:
    form, chance = formats.get(name), random.Random(name)
    units = [*FRAGMENTS, *("".join(chance.choices(FRAGMENTS, k=3)) for _ in range(60))]
    slow = [
        (opening, unit)
        for unit in units
        for opening in ("", chance.choice(OPENINGS))
        if not grows_linearly(form, opening, unit)
    ]
    assert slow == []
