"""Conformance rows of the formats beside CodeAct and Hermes: each reads its own shape whole, or nothing at all."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from skyenv import formats
from skyenv.engines.dialects import resent
from skyenv.errors import ConfigError
from skyenv.formats.openai import OpenAITools, answer_all
from skyenv.tools import default_tools
from skyenv.types import FinishReason, Message, NativeCall, ToolCall, ToolSpec

LIST_TOOL = ToolSpec(
    "plan",
    "Keep a plan.",
    {
        "type": "object",
        "properties": {"steps": {"type": "array"}, "meta": {"type": "object"}, "count": {"type": "integer"}},
    },
)
TOOLS = (*(tool.spec for tool in default_tools()), LIST_TOOL)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def bash(*commands: str) -> list[ToolCall]:
    return [ToolCall("execute_bash", {"command": command}) for command in commands]


def q(command: str, name: str = "execute_bash") -> str:
    return f"<tool_call>\n<function={name}>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def plan(parameter: str, value: str) -> str:
    return f"<tool_call>\n<function=plan>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def v3(arguments: str, name: str = "execute_bash") -> str:
    return f"{ONE}function{SEP}{name}\n```json\n{arguments}\n```{ONE_END}"


def v31(arguments: str, name: str = "execute_bash") -> str:
    return f"{ONE}{name}{SEP}{arguments}{ONE_END}"


def to(arguments: str, name: str = "execute_bash") -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


LS = '{"command": "ls"}'
PWD = '{"command": "pwd"}'
ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"

CALLS: dict[str, tuple[str, str, list[ToolCall], int]] = {
    "qwen-one": ("qwen3_coder", q("ls"), bash("ls"), 0),
    "qwen-P1": ("qwen3_coder", "I look.\n" + q("ls") + "\nThat lists.", bash("ls"), 0),
    "qwen-two": ("qwen3_coder", q("ls") + "\n" + q("pwd"), bash("ls", "pwd"), 0),
    "qwen-P30-no-wrapper": ("qwen3_coder", q("ls").replace("<tool_call>\n", "", 1), bash("ls"), 0),
    "qwen-P2": ("qwen3_coder", q("ls").removesuffix("</function>\n</tool_call>"), bash("ls"), 0),
    "qwen-P18": ("qwen3_coder", q("    x = 1"), bash("    x = 1"), 0),
    "qwen-P21": ("qwen3_coder", q("a\n</parameter>\nb </tool_call>"), bash("a\n</parameter>\nb </tool_call>"), 0),
    "qwen-P22": ("qwen3_coder", q("grep '</function>' x"), bash("grep '</function>' x"), 0),
    "qwen-P27": ("qwen3_coder", f"<think>{q('rm')}</think>\n{q('ls')}", bash("ls"), 0),
    "qwen-P45-json": ("qwen3_coder", plan("steps", '["a", null]'), [ToolCall("plan", {"steps": ["a", None]})], 0),
    "qwen-P45-literal": ("qwen3_coder", plan("meta", "{'a': True}"), [ToolCall("plan", {"meta": {"a": True}})], 1),
    "qwen-P42-null": ("qwen3_coder", plan("count", "null"), [ToolCall("plan", {})], 0),
    "llama-one": ("llama3_json", f'{{"name": "execute_bash", "parameters": {LS}}}', bash("ls"), 0),
    "llama-tag": ("llama3_json", f'<|python_tag|>{{"name": "execute_bash", "arguments": {LS}}}', bash("ls"), 0),
    "llama-type": ("llama3_json", f'{{"type": "function", "name": "execute_bash", "parameters": {LS}}}', bash("ls"), 0),
    "llama-two": (
        "llama3_json",
        f'{{"name": "execute_bash", "parameters": {LS}}}; {{"name": "execute_bash", "parameters": {PWD}}}',
        bash("ls", "pwd"),
        0,
    ),
    "llama-semicolon-inside": (
        "llama3_json",
        '{"name": "execute_bash", "parameters": {"command": "a; {\\"name\\": 1}; b"}}',
        bash('a; {"name": 1}; b'),
        0,
    ),
    "llama-P1": ("llama3_json", f'I look.\n{{"name": "execute_bash", "parameters": {LS}}}', bash("ls"), 0),
    "llama-P27": (
        "llama3_json",
        f'<think>\n{{"name": "finish", "parameters": {{}}}}\n</think>{{"name": "execute_bash", "parameters": {LS}}}',
        bash("ls"),
        0,
    ),
    "llama-P39-brace": ("llama3_json", f'{{"name": "execute_bash", "parameters": {LS}}}}}', bash("ls"), 1),
    "mistral-list": (
        "mistral",
        f'[TOOL_CALLS][{{"name": "execute_bash", "arguments": {LS}, "id": "abcDEF123"}}]',
        bash("ls"),
        0,
    ),
    "mistral-two": (
        "mistral",
        f'[TOOL_CALLS] [{{"name":"execute_bash","arguments":{LS}}},{{"name":"execute_bash","arguments":{PWD}}}]',
        bash("ls", "pwd"),
        0,
    ),
    "mistral-named": ("mistral", f"I look.[TOOL_CALLS]execute_bash[ARGS]{LS}", bash("ls"), 0),
    "mistral-named-id": ("mistral_named", f"[TOOL_CALLS]execute_bash[CALL_ID]abc123XYZ[ARGS]{LS}", bash("ls"), 0),
    "mistral-named-two": (
        "mistral_named",
        f"[TOOL_CALLS]execute_bash[ARGS]{LS}[TOOL_CALLS]execute_bash[ARGS]{PWD}",
        bash("ls", "pwd"),
        0,
    ),
    "mistral-bad-id": (
        "mistral",
        f'[TOOL_CALLS][{{"name": "execute_bash", "arguments": {LS}, "id": "call-1"}}]',
        bash("ls"),
        1,
    ),
    "mistral-marker-inside": (
        "mistral",
        '[TOOL_CALLS][{"name": "execute_bash", "arguments": {"command": "echo [TOOL_CALLS][{}]"}}]',
        bash("echo [TOOL_CALLS][{}]"),
        0,
    ),
    "mistral-P27": (
        "mistral",
        f"[THINK][TOOL_CALLS]execute_bash[ARGS]{PWD}[/THINK][TOOL_CALLS]execute_bash[ARGS]{LS}",
        bash("ls"),
        0,
    ),
    "mistral-encoded-twice": (
        "mistral",
        '[TOOL_CALLS][{"name": "execute_bash", "arguments": "{\\"command\\": \\"ls\\"}"}]',
        bash("ls"),
        1,
    ),
    "deepseek-v3": ("deepseek", BEGIN + v3(LS) + END, bash("ls"), 0),
    "deepseek-v31": ("deepseek", BEGIN + v31(LS) + END, bash("ls"), 0),
    "deepseek-v3-two": ("deepseek_v31", BEGIN + v3(LS) + "\n" + v3(PWD) + END, bash("ls", "pwd"), 0),
    "deepseek-v31-two": ("deepseek_v31", BEGIN + v31(LS) + v31(PWD) + END, bash("ls", "pwd"), 0),
    "deepseek-lines": ("deepseek_v31", BEGIN + v31('{\n  "command": "a\\nb"\n}') + END, bash("a\nb"), 0),
    "deepseek-P2": ("deepseek", BEGIN + v3(LS).removesuffix(ONE_END), bash("ls"), 0),
    "deepseek-P2-v31": ("deepseek_v31", "So.\n" + BEGIN + v31(LS), bash("ls"), 0),
    "deepseek-P27": ("deepseek", f"<think>{BEGIN}{v3(PWD)}{END}</think>{BEGIN}{v3(LS)}{END}", bash("ls"), 0),
    "deepseek-token-inside": (
        "deepseek",
        BEGIN + v3('{"command": "echo ' + ONE_END + END + ' ```"}') + END,
        bash("echo " + ONE_END + END + " ```"),
        0,
    ),
    "harmony-one": ("harmony", to(LS), bash("ls"), 0),
    "harmony-P1": ("harmony", ANALYSIS + to(LS) + "<|call|>", bash("ls"), 0),
    "harmony-header-order": (
        "harmony",
        ANALYSIS + f" to=functions.execute_bash<|channel|>commentary json<|message|>{LS}",
        bash("ls"),
        0,
    ),
    "harmony-first-header-order": (
        "harmony",
        f" to=functions.execute_bash<|channel|>commentary json<|message|>{LS}<|call|>",
        bash("ls"),
        0,
    ),
    "harmony-P27": (
        "harmony",
        f"<|channel|>analysis<|message|>to=functions.execute_bash {PWD}<|end|><|start|>assistant{to(LS)}",
        bash("ls"),
        0,
    ),
    "harmony-preamble": (
        "harmony",
        "<|channel|>commentary<|message|>I list.<|end|><|start|>assistant" + to(LS),
        bash("ls"),
        0,
    ),
    "harmony-marker-inside": (
        "harmony",
        to('{"command": "echo <|call|><|start|>assistant"}'),
        bash("echo <|call|><|start|>assistant"),
        0,
    ),
    "harmony-raw-line-break": ("harmony", to('{"command": "a\nb"}'), bash("a\nb"), 1),
    "harmony-P34": ("harmony", to("", "finish").replace("<|message|>", "<|message|>{}"), [ToolCall("finish", {})], 0),
    "openai-text": (
        "openai",
        '{"tool_calls": [{"id": "a", "function": {"name": "execute_bash", "arguments": "{\\"command\\": \\"ls\\"}"}}]}',
        bash("ls"),
        0,
    ),
}


@pytest.mark.parametrize("row", CALLS)
def test_calls(row: str) -> None:
    name, text, calls, repairs = CALLS[row]
    parsed = formats.get(name).parse(text, TOOLS)
    assert parsed.error is None
    assert list(parsed.calls) == calls
    assert parsed.repairs == repairs


ERRORS: dict[str, tuple[str, str, FinishReason, str]] = {
    "qwen-P3": ("qwen3_coder", q("ls -la")[:60], "length", "cut off"),
    "qwen-P5": ("qwen3_coder", q("ls") + q("pwd")[:50], "length", "cut off"),
    "qwen-P7": ("qwen3_coder", q("ls").replace("<function=", "<function = "), "stop", "Expected format"),
    "qwen-P9": ("qwen3_coder", q("ls", "bash"), "stop", "execute_bash, finish"),
    "qwen-P31": (
        "qwen3_coder",
        f'<tool_call>\n{{"name": "execute_bash", "arguments": {LS}}}\n</tool_call>',
        "stop",
        "as JSON between <tool_call> tags",
    ),
    "qwen-P45-nonsense": ("qwen3_coder", plan("meta", "{'a': open('x')}"), "stop", "an object"),
    "qwen-P45-no-json": ("qwen3_coder", plan("steps", "{1, 2}"), "stop", "an array"),
    "qwen-P45-number-keys": ("qwen3_coder", plan("meta", "{1: 2}"), "stop", "an object"),
    "qwen-too-many-tags": ("qwen3_coder", q("<parameter=x>" * 17_000), "stop", "more than 16384 tags"),
    "llama-text-after": ("llama3_json", f'{{"name": "execute_bash", "parameters": {LS}}} Done.', "stop", "follows"),
    "llama-P3": ("llama3_json", '{"name": "execute_bash", "parameters": {"command": "ls', "length", "cut off"),
    "llama-second-cut": ("llama3_json", f'{{"name": "execute_bash", "parameters": {LS}}}; {{"na', "length", "cut off"),
    "llama-more-may-follow": ("llama3_json", f'{{"name": "execute_bash", "parameters": {LS}}};', "length", "cut off"),
    "llama-both-keys": (
        "llama3_json",
        '{"name": "finish", "parameters": {}, "arguments": {}}',
        "stop",
        "one JSON object",
    ),
    "llama-python": ("llama3_json", "<|python_tag|>print(1)", "stop", "not valid JSON"),
    "llama-mid-line": (
        "llama3_json",
        f'Use {{"name": "execute_bash", "parameters": {LS}}}',
        "stop",
        "as a JSON object",
    ),
    "llama-P31": ("llama3_json", q("ls"), "stop", "Expected format"),
    "mistral-not-a-list": ("mistral", '[TOOL_CALLS]{"name": "finish"}', "stop", "No call"),
    "mistral-P3": ("mistral", '[TOOL_CALLS][{"name": "execute_bash", "arguments": {"comm', "length", "cut off"),
    "mistral-P3-marker": ("mistral", "[TOOL_CALLS]", "length", "cut off"),
    "mistral-empty": ("mistral", "[TOOL_CALLS][]", "stop", "no list of calls"),
    "mistral-no-marker": ("mistral", f"execute_bash[ARGS]{LS}", "stop", "[TOOL_CALLS]"),
    "mistral-P31": ("mistral", to(LS), "stop", "with to=functions"),
    "mistral-single-quotes": ("mistral", "[TOOL_CALLS][{'name': 'finish'}]", "stop", "not valid JSON"),
    "deepseek-P3": ("deepseek", BEGIN + v3('{"command": "ls'), "length", "cut off"),
    "deepseek-P5": ("deepseek", BEGIN + v3(LS) + ONE + "func", "length", "cut off"),
    "deepseek-no-group": ("deepseek", v3(LS), "stop", "no such tag"),
    "deepseek-empty-group": ("deepseek", BEGIN + END, "stop", "something else"),
    "deepseek-text-after": ("deepseek_v31", BEGIN + ONE + "finish" + SEP + "{} rm" + ONE_END, "stop", "stands between"),
    "deepseek-P9": ("deepseek_v31", BEGIN + v31("{}", "bash") + END, "stop", "execute_bash, finish"),
    "deepseek-P31": ("deepseek", f"[TOOL_CALLS]execute_bash[ARGS]{LS}", "stop", "with [TOOL_CALLS]"),
    "harmony-P3": ("harmony", to('{"command": "l'), "length", "cut off"),
    "harmony-P3-header": ("harmony", ANALYSIS + "<|channel|>comm", "length", "cut off"),
    "harmony-wrong-channel": ("harmony", to(LS).replace("commentary", "analysis"), "stop", "commentary channel"),
    "harmony-wrong-recipient": ("harmony", to(LS).replace("functions.", "browser."), "stop", "functions.tool_name"),
    "harmony-P41": ("harmony", to(LS, "execute_bash</parameter"), "stop", "not written exactly"),
    "harmony-text-after": ("harmony", to(LS) + " rm", "stop", "follows"),
    "harmony-text-between": ("harmony", "<|channel|>analysis<|message|>x<|end|>y" + to(LS), "stop", "between two"),
    "harmony-too-many-messages": ("harmony", ANALYSIS * 300 + to(LS), "stop", "at most 256 messages"),
    "harmony-P31": ("harmony", q("ls"), "stop", "with <function=...>"),
    "harmony-P39-list": ("harmony", to('["ls"]'), "stop", "object"),
    "openai-P31": ("openai", q("ls"), "stop", "with <function=...>"),
    "openai-no-list": ("openai", '{"tool_calls": 1}', "stop", "not a list"),
    "codeact-P31": ("codeact", BEGIN + v3(LS) + END, "stop", "DeepSeek"),
    "codeact-P31-mistral": ("codeact", f"[TOOL_CALLS]execute_bash[ARGS]{LS}", "stop", "Expected format:\n<function="),
    "hermes-P31": ("hermes", to(LS), "stop", "Expected format:\n<tool_call>"),
    "hermes-P31-bare": ("hermes", f'{{"name": "execute_bash", "arguments": {LS}}}', "stop", "as a JSON object"),
}


@pytest.mark.parametrize("row", ERRORS)
def test_errors(row: str) -> None:
    name, text, finish_reason, said = ERRORS[row]
    parsed = formats.get(name).parse(text, TOOLS, finish_reason=finish_reason)
    assert parsed.calls == ()
    assert parsed.error is not None
    assert said in parsed.error
    assert "othing was run" in parsed.error


@pytest.mark.parametrize("name", formats.names())
def test_one_answer_makes_a_bounded_number_of_calls(name: str) -> None:
    form = formats.get(name)
    between = "<|call|><|start|>assistant" if name == "harmony" else "\n"
    text = between.join([form.render_call(bash("ls")[0])] * 65)
    assert "at most 64 calls" in str(form.parse(text, TOOLS).error)
    assert len(form.parse(between.join([form.render_call(bash("ls")[0])] * 64), TOOLS).calls) == 64


ALPHABET = [*"ab \n\t\r\"'\\{}[];<>/=,:`|", "\u00e9", "\u4e16", "\U0001f389", "</parameter>", "</function>", "<think>"]
ALPHABET += [
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|call|>",
    "<|end|>",
    "[TOOL_CALLS]",
    END,
    ONE_END,
    "```",
    "null",
]


def chance_value(chance: random.Random, depth: int = 0) -> Any:
    kinds = ["text", "text", "number", "flag"] + (["list", "dict"] if depth < 3 else [])
    match chance.choice(kinds):
        case "number":
            return chance.choice([0, -1, 10**15, 0.5, -2.25e-7])
        case "flag":
            return chance.random() < 0.5
        case "list":
            return [chance_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case "dict":
            return {chance_text(chance): chance_value(chance, depth + 1) for _ in range(chance.randrange(4))}
    return chance_text(chance)


def chance_text(chance: random.Random) -> str:
    return "".join(chance.choices(ALPHABET, k=chance.randrange(12)))


@pytest.mark.parametrize("name", formats.names())
def test_round_trip_of_a_thousand_values(name: str) -> None:
    """Any JSON value under any of the schema's types: what is written is what is read."""
    form, chance = formats.get(name), random.Random(name)
    for _ in range(1000):
        arguments: dict[str, Any] = {"steps": [chance_value(chance) for _ in range(3)], "count": chance.randrange(9)}
        if chance.random() < 0.7:
            arguments["meta"] = {chance_text(chance): chance_value(chance)}
        call = ToolCall("plan", arguments)
        if chance.random() < 0.5:
            call = ToolCall("execute_bash", {"command": chance_text(chance)})
        parsed = form.parse(form.render_call(call), TOOLS)
        assert (parsed.error, parsed.calls, parsed.repairs) == (None, (call,), 0)


NATIVE: dict[str, tuple[Any, list[ToolCall] | str, int]] = {
    "object": ({"command": "ls"}, bash("ls"), 0),
    "text": (LS, bash("ls"), 0),
    "encoded-twice": ('"{\\"command\\": \\"ls\\"}"', bash("ls"), 1),
    "surplus-brace": (LS + "}", bash("ls"), 1),
    "raw-line-break": ('{"command": "a\nb"}', bash("a\nb"), 1),
    "single-quotes": ("{'command': 'ls'}", "not valid JSON", 0),
    "list": ('["ls"]', "must be an object", 0),
    "text-behind": (LS + " x", "follows", 0),
}


@pytest.mark.parametrize("row", NATIVE)
def test_p39_native_arguments(row: str) -> None:
    arguments, wanted, repairs = NATIVE[row]
    parsed = OpenAITools().parse_native("", [NativeCall("c1", "execute_bash", arguments)], TOOLS, finish_reason="stop")
    if isinstance(wanted, str):
        assert parsed.calls == ()
        assert wanted in str(parsed.error)
    else:
        assert (parsed.error, list(parsed.calls), parsed.repairs) == (None, wanted, repairs)
        assert parsed.calls[0].id == "c1"


@pytest.mark.parametrize("arguments", ["", None, "null", "  "])
def test_p39_native_nothing_is_no_arguments(arguments: Any) -> None:
    parsed = OpenAITools().parse_native("", [NativeCall("c1", "finish", arguments)], TOOLS, finish_reason="stop")
    assert (parsed.error, list(parsed.calls)) == (None, [ToolCall("finish", {})])


@pytest.mark.parametrize("name", ["execute_bash</parameter", "execute_bash<|channel|>commentary"])
def test_p41_native_names(name: str) -> None:
    parsed = OpenAITools().parse_native("", [NativeCall("c1", name, "{}")], TOOLS, finish_reason="stop")
    assert "Available tools: execute_bash, finish, plan, str_replace_editor" in str(parsed.error)


def test_p42_native_nulls_and_text() -> None:
    arguments = {"command": "view", "path": "/f", "view_range": "[1, 2]", "insert_line": None}
    call = NativeCall("c1", "str_replace_editor", arguments)
    parsed = OpenAITools().parse_native("", [call], TOOLS, finish_reason="stop")
    assert list(parsed.calls) == [
        ToolCall("str_replace_editor", {"command": "view", "path": "/f", "view_range": [1, 2]})
    ]


def test_native_calls_cut_off_and_calls_in_text() -> None:
    call = NativeCall("c1", "execute_bash", '{"command": "l')
    assert "cut off" in str(OpenAITools().parse_native("", [call], TOOLS, finish_reason="length").error)
    both = OpenAITools().render_call(bash("ls")[0])
    refused = OpenAITools().parse_native(both, [NativeCall("c", "finish", "{}")], TOOLS, finish_reason="stop")
    assert "both in the text and beside it" in str(refused.error)


def test_p40_every_id_is_answered() -> None:
    calls = [NativeCall("a", "execute_bash", LS), NativeCall("b", "finish", "{}"), NativeCall("c", "x", "{}")]
    ran = ToolCall("execute_bash", {"command": "ls"}, id="a")
    answered = answer_all(calls, [("out", ran)])
    assert [(m.call_id, m.content) for m in answered] == [("a", "out"), ("b", "Not run."), ("c", "Not run.")]
    refused = answer_all(calls, [("ERROR: no", None)])
    assert [(m.call_id, m.content) for m in refused] == [("a", "ERROR: no"), ("b", "Not run."), ("c", "Not run.")]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        (LS, LS),
        ({"a": 1}, '{"a": 1}'),
        (None, "{}"),
        ("", "{}"),
        ("{'a'", '{"invalid_arguments": "{\'a\'"}'),
        ("[1]", '{"invalid_arguments": "[1]"}'),
    ],
)
def test_calls_are_sent_back_as_json_objects(arguments: Any, sent: str) -> None:
    assert resent(NativeCall("a", "x", arguments))["function"]["arguments"] == sent


def test_ids_of_mistral_are_nine_letters_and_digits() -> None:
    form = formats.get("mistral")
    call = bash("ls")[0]
    (parsed,) = form.parse(form.render_call(call), TOOLS).calls
    assert len(parsed.id) == 9
    assert parsed.id.isalnum()
    assert form.observation("out", parsed) == Message("tool", "out", name="execute_bash", call_id=parsed.id)


class Shouting:
    """A format of a user's own, complete in one class."""

    name = "shouting"

    def render_tools(self, specs: Any) -> str:
        return ""

    def render_call(self, call: ToolCall) -> str:
        return f"RUN {call.arguments['command']}"

    def parse(self, text: str, tools: Any, *, finish_reason: str = "stop", thinking_open: bool = False) -> Any:
        head, _, command = text.partition("RUN ")
        return formats.Parsed(tuple(bash(command)) if command else (), None, head)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        return Message("user", text)


def test_a_format_of_ones_own() -> None:
    path = f"{__name__}:Shouting"
    assert list(formats.get(path).parse("RUN ls", TOOLS).calls) == bash("ls")
    own = Shouting()
    assert formats.get(own) is own
    with pytest.raises(ConfigError, match="no 'Nothing'"):
        formats.get(f"{__name__}:Nothing")
    with pytest.raises(ConfigError, match="cannot import"):
        formats.get("no_such_module:X")
    with pytest.raises(ConfigError, match="lacks a method"):
        formats.get(SimpleNamespace(name="x"))  # type: ignore[arg-type]
