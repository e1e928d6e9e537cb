"""The parsers' conformance rows; nothing damaged or unintended may come out as a call."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv import formats
from skyenv.errors import ConfigError
from skyenv.tools import default_tools
from skyenv.types import FinishReason, Message, ToolCall

TOOLS = tuple(tool.spec for tool in default_tools())
CODEACT, HERMES, HARMONY = formats.get("codeact"), formats.get("hermes"), formats.get("harmony")
ALL_FORMATS = [formats.get(name) for name in formats.names()]
TEXT_FORMATS = [form for form in ALL_FORMATS if form is not HARMONY]


def f(command: str, name: str = "execute_bash", parameter: str = "command") -> str:
    return f"<function={name}>\n<parameter={parameter}>{command}</parameter>\n</function>"


def edit(**arguments: str) -> str:
    inner = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in arguments.items())
    return f"<function=str_replace_editor>\n{inner}</function>"


def bash(*commands: str) -> list[ToolCall]:
    return [ToolCall("execute_bash", {"command": command}) for command in commands]


def view(**rest: Any) -> list[ToolCall]:
    return [ToolCall("str_replace_editor", {"command": "view", "path": "/f", **rest})]


def replaced(old: str) -> list[ToolCall]:
    return [ToolCall("str_replace_editor", {"command": "str_replace", "path": "/f", "old_str": old})]


WRITE_TAGS = "cat > x <<'E'\n<function=a>\n<parameter=b>1</parameter>\n<parameter=c>2</parameter>\n</function>\nE"

CALLS: dict[str, tuple[str, list[ToolCall]]] = {
    "P1-prose-before": ("I look.\n" + f("ls"), bash("ls")),
    "P1-prose-after": (f("ls") + "\nThat lists.", bash("ls")),
    "P1-fenced": ("```\n" + f("ls") + "\n```", bash("ls")),
    "P2-no-close": (f("ls").removesuffix("</function>"), bash("ls")),
    "P2-close-begun": (f("ls").removesuffix("</function>") + "</", bash("ls")),
    "P2-close-almost": (f("ls").removesuffix("</function>") + "</function", bash("ls")),
    "P5-two": (f("ls") + "\n" + f("pwd"), bash("ls", "pwd")),
    "P6-no-newlines": ("<function=execute_bash><parameter=command>ls</parameter></function>", bash("ls")),
    "P6-crlf": (f("\nls\n").replace("\n", "\r\n"), bash("ls")),
    "P13-capital-true": (
        "<function=execute_bash>\n<parameter=command>y</parameter>\n<parameter=is_input>True</parameter>\n</function>",
        [ToolCall("execute_bash", {"command": "y", "is_input": True})],
    ),
    "P14-plain": (edit(command="view", path="/f", insert_line="5"), view(insert_line=5)),
    "P14-newlines": (edit(command="view", path="/f", insert_line="\n5\n"), view(insert_line=5)),
    "P14-float": (edit(command="view", path="/f", insert_line="5.0"), view(insert_line=5)),
    "P15-json": (edit(command="view", path="/f", view_range="[1, -1]"), view(view_range=[1, -1])),
    "P15-bare": (edit(command="view", path="/f", view_range="1, 10"), view(view_range=[1, 10])),
    "P15-tuple": (edit(command="view", path="/f", view_range="(1, 10)"), view(view_range=[1, 10])),
    "P17-number": (
        "<function=execute_bash>\n<parameter=command>x</parameter>\n<parameter=timeout>30</parameter>\n</function>",
        [ToolCall("execute_bash", {"command": "x", "timeout": 30.0})],
    ),
    "P18-indent": (edit(command="str_replace", path="/f", old_str="    x = 1"), replaced("    x = 1")),
    "P19-one-line-break-each-side": (
        edit(command="str_replace", path="/f", old_str="\n    if a:\n        b\n"),
        replaced("    if a:\n        b"),
    ),
    "P19-two-line-breaks": (edit(command="str_replace", path="/f", old_str="\n\nx\n\n"), replaced("\nx\n")),
    "P21-close-parameter-inside": (f("echo '</parameter>' > x"), bash("echo '</parameter>' > x")),
    "P21-close-parameter-line": (f("a\n</parameter>\nb"), bash("a\n</parameter>\nb")),
    "P22-close-function-inside": (f("grep '</function>' x"), bash("grep '</function>' x")),
    "P22-both-closes-inside": (f("a</parameter>\n</function>"), bash("a</parameter>\n</function>")),
    "P23-open-inside-closed": (f("echo '" + f("rm") + "'"), bash("echo '" + f("rm") + "'")),
    "P23-open-inside-two-parameters": (f(WRITE_TAGS), bash(WRITE_TAGS)),
    "P23-open-inside-unclosed": (f("grep '<function=' log"), bash("grep '<function=' log")),
    "P23-open-inside-unclosed-name": (f("grep '<function=foo>' log"), bash("grep '<function=foo>' log")),
    "P23-open-parameter-inside": (f("grep '<parameter=x>' l") + f("ls"), bash("grep '<parameter=x>' l", "ls")),
    "P26-entities": (f("echo '&lt;a&gt; <![CDATA[x]]>'"), bash("echo '&lt;a&gt; <![CDATA[x]]>'")),
    "P26-unicode": (
        f("echo '\u05d0\u4e16\U0001f389 \\\\ \\n \\u0000'"),
        bash("echo '\u05d0\u4e16\U0001f389 \\\\ \\n \\u0000'"),
    ),
    "P27-thinking": ("<think>maybe " + f("rm -rf /") + "</think>\n" + f("ls"), bash("ls")),
    "P27-thinking-after-prose": ("So <think>" + f("rm -rf /") + "</think>" + f("ls"), bash("ls")),
    "P27-thinking-not-opened-here": (f"maybe\n</think>\n{f('ls')}", bash("ls")),
    "P29-short-thinking": ("<think>x</think>\n" + f("ls"), bash("ls")),
    "P30-wrapper": ("<tool_call>\n" + f("ls") + "\n</tool_call>", bash("ls")),
    "P34-finish-without-message": ("<function=finish>\n</function>", [ToolCall("finish", {})]),
    "P35-empty-command": (f(""), bash("")),
    "P36-security-risk": (
        "<function=execute_bash>\n<parameter=command>ls</parameter>\n<parameter=security_risk>LOW</parameter>\n</function>",
        bash("ls"),
    ),
    "json-form": (
        '<function=execute_bash>\n<parameter=command json>"a\\u003c/parameter>\\n"</parameter>\n</function>',
        bash("a</parameter>\n"),
    ),
}


@pytest.mark.parametrize("row", CALLS)
def test_codeact_calls(row: str) -> None:
    text, calls = CALLS[row]
    parsed = CODEACT.parse(text, TOOLS)
    assert parsed.error is None
    assert list(parsed.calls) == calls


ERRORS: dict[str, tuple[str, FinishReason, str]] = {
    "P2-more-may-have-followed": (f("ls").removesuffix("</function>"), "length", "cut off"),
    "P3-cut-in-value": (f("ls").split("s</par")[0], "length", "cut off"),
    "P3-cut-in-value-stop": (f("ls").split("s</par")[0], "stop", "not closed"),
    "P3-cut-before-new-str": (
        edit(command="str_replace", path="/f", old_str="keep me").removesuffix("</function>"),
        "length",
        "cut off",
    ),
    "P5-second-cut": (f("ls") + f("pwd").split("wd</par")[0], "length", "cut off"),
    "P7-spaces": (
        "<function = execute_bash>\n<parameter=command>ls</parameter>\n</function>",
        "stop",
        "Expected format",
    ),
    "P7-capitals": (f("ls").replace("function", "Function"), "stop", "Expected format"),
    "P9-unknown-tool": (f("ls", name="bash"), "stop", "execute_bash, finish, str_replace_editor"),
    "P10-unknown-parameter": (f("ls", parameter="cmd"), "stop", "command, is_input, timeout"),
    "P11-missing": (edit(command="view"), "stop", "'path'"),
    "P11-enum": (edit(command="delete", path="/f"), "stop", "create, insert, str_replace, undo_edit, view"),
    "P14-word": (edit(command="insert", path="/f", insert_line="five"), "stop", "an integer"),
    "P14-empty": (edit(command="insert", path="/f", insert_line=""), "stop", "an integer"),
    "P17-word": (f("ls").replace("</function>", "<parameter=timeout>abc</parameter>\n</function>"), "stop", "a number"),
    "P31-json": ('<tool_call>\n{"name": "execute_bash", "arguments": {}}\n</tool_call>', "stop", "Expected format"),
    "P32-two-equals": (
        "<function=execute_bash>\n<parameter=command=ls</parameter>\n</function>",
        "stop",
        "Expected format",
    ),
    "P41-name-with-tag": ("<function=execute_bash</parameter>\n</function>", "stop", "Expected format"),
    "P41-name-with-token": (f("ls", name="execute_bash<|channel|>commentary"), "stop", "Expected format"),
    "left-over-close": (f("ls") + "\n</function>", "stop", "left over"),
    "missing-close-before-next-call": (f("ls").replace("</parameter>", "") + f("pwd"), "stop", "unambiguous"),
    "text-between": ("<function=execute_bash>\nls\n</function>", "stop", "between the tags"),
    "given-twice": (f("ls").replace("</function>", f("rm").split("\n", 1)[1]), "stop", "given twice"),
    "thinking-closed-after-a-call": (f("rm") + "</think>" + f("ls"), "stop", "no such tag"),
    "one-good-one-bad": (f("ls") + f("x", name="nope"), "stop", "no tool named"),
    "prose-cut": ("I was about to", "length", "cut off"),
    "aborted": (f("ls")[:20], "abort", "cut off"),
    "json-form-broken": (f("x").replace("command", "command json"), "stop", "one JSON string"),
}


@pytest.mark.parametrize("row", ERRORS)
def test_codeact_errors(row: str) -> None:
    text, finish_reason, said = ERRORS[row]
    parsed = CODEACT.parse(text, TOOLS, finish_reason=finish_reason)
    assert parsed.calls == ()
    assert parsed.error is not None
    assert said in parsed.error
    assert "othing was run" in parsed.error


@pytest.mark.parametrize("text", ["I am done.", "", " \n ", "<think>" + f("rm"), "a < b, function = x"])
@pytest.mark.parametrize("name", formats.names())
def test_p37_no_call_is_no_error(name: str, text: str) -> None:
    parsed = formats.get(name).parse(text, TOOLS)
    assert parsed.calls == ()
    assert parsed.error is None


@pytest.mark.parametrize("form", TEXT_FORMATS, ids=lambda form: form.name)
def test_thinking_opened_by_the_prompt(form: formats.Format) -> None:
    inside, after = form.render_call(bash("rm")[0]), form.render_call(bash("ls")[0])
    assert list(form.parse(f"{inside}\n</think>\n{after}", TOOLS, thinking_open=True).calls) == bash("ls")
    unfinished = form.parse(inside, TOOLS, thinking_open=True)
    assert (unfinished.calls, unfinished.error) == ((), None)


def test_content_is_what_a_reader_sees() -> None:
    text = "<think>hm</think>\nI list.\n\n<tool_call>\n" + f("ls") + "\n</tool_call>"
    assert CODEACT.parse(text, TOOLS).content == "I list."
    assert HERMES.parse("<think>hm</think>\nI list.\n" + h("{}"), TOOLS).content == "I list."


def h(arguments: str, name: str = "execute_bash") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES_CALLS: dict[str, tuple[str, list[ToolCall], int]] = {
    "one": (h('{"command": "ls"}'), bash("ls"), 0),
    "two": (h('{"command": "ls"}') + "\n" + h('{"command": "pwd"}'), bash("ls", "pwd"), 0),
    "last-unclosed": (h('{"command": "ls"}').removesuffix("</tool_call>"), bash("ls"), 0),
    "close-begun": (h('{"command": "ls"}').removesuffix("call>"), bash("ls"), 0),
    "one-line": ('<tool_call>{"name":"execute_bash","arguments":{"command":"ls"}}</tool_call>', bash("ls"), 0),
    "P27": (f"<think>{h('1')}</think>" + h('{"command": "ls"}'), bash("ls"), 0),
    "P34": (h("{}", "finish"), [ToolCall("finish", {})], 0),
    "P36": (h('{"command": "ls", "security_risk": "LOW"}'), bash("ls"), 0),
    "P39-empty-string": (h('""', "finish"), [ToolCall("finish", {})], 0),
    "P39-null": (h("null", "finish"), [ToolCall("finish", {})], 0),
    "P39-encoded-twice": (h('"{\\"command\\": \\"ls\\"}"'), bash("ls"), 1),
    "P39-surplus-brace": (h('{"command": "ls"}}'), bash("ls"), 1),
    "P39-raw-line-break": (h('{"command": "a\nb"}'), bash("a\nb"), 1),
    "P42-nulls": (
        h('{"command": "view", "path": "/f", "view_range": null, "insert_line": null}', "str_replace_editor"),
        view(),
        0,
    ),
    "P42-range-as-text": (
        h('{"command": "view", "path": "/f", "view_range": "[1, 2]"}', "str_replace_editor"),
        view(view_range=[1, 2]),
        0,
    ),
    "P44-close-inside": (h('{"command": "echo </tool_call> </think>"}'), bash("echo </tool_call> </think>"), 0),
}


@pytest.mark.parametrize("row", HERMES_CALLS)
def test_hermes_calls(row: str) -> None:
    text, calls, repairs = HERMES_CALLS[row]
    parsed = HERMES.parse(text, TOOLS)
    assert parsed.error is None
    assert list(parsed.calls) == calls
    assert parsed.repairs == repairs


HERMES_ERRORS: dict[str, tuple[str, FinishReason, str]] = {
    "P3-cut": (h('{"command": "ls -')[:60], "length", "cut off"),
    "P9": (h('{"command": "ls"}', "bash"), "stop", "execute_bash, finish, str_replace_editor"),
    "P10": (h('{"cmd": "ls"}'), "stop", "command, is_input, timeout"),
    "P39-single-quotes": (h("{'command': 'ls'}"), "stop", "not valid JSON"),
    "P39-list": (h('["ls"]'), "stop", "object"),
    "P41-tag": (h('{"command": "ls"}', "execute_bash</parameter"), "stop", "no tool named"),
    "P41-token": (h('{"command": "ls"}', "execute_bash<|channel|>commentary"), "stop", "no tool named"),
    "P31-codeact": (f("ls"), "stop", "Expected format"),
    "wrong-type": (h('{"command": 5}'), "stop", "a string"),
    "no-name": ('<tool_call>\n{"arguments": {}}\n</tool_call>', "stop", '"name" and "arguments"'),
    "text-after-object": (h("{}").replace("\n</", " rm\n</"), "stop", "follows"),
    "left-over-close": (h('{"command": "ls"}') + "</tool_call>", "stop", "no such tag"),
    "key-twice": (h('{"command": "ls", "command": "rm"}'), "stop", "twice"),
    "not-a-number": (h('{"command": "ls", "timeout": NaN}'), "stop", "NaN"),
    "lone-surrogate": (h('{"command": "\\ud800"}'), "stop", "surrogate"),
    "nested-too-deeply": (h("[" * 100_000), "stop", "nested"),
    "huge-number": (h('{"command": "ls", "timeout": ' + "9" * 5000 + "}"), "stop", "JSON"),
}


@pytest.mark.parametrize("row", HERMES_ERRORS)
def test_hermes_errors(row: str) -> None:
    text, finish_reason, said = HERMES_ERRORS[row]
    parsed = HERMES.parse(text, TOOLS, finish_reason=finish_reason)
    assert parsed.calls == ()
    assert parsed.error is not None
    assert said in parsed.error
    assert parsed == HERMES.parse(text, TOOLS, finish_reason=finish_reason)


SOUP = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "</parameter>",
                "</function>",
                "<function=execute_bash>",
                "<parameter=command>",
                "<parameter=path>",
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                "\n",
                "\r\n",
                "\r",
                " ",
                '"',
                "}",
                "{",
                "\\",
                "<",
                "</",
                '{"name": "execute_bash", "arguments": {"command": "ls"}}',
                "<|python_tag|>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "execute_bash",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "```",
                "<|channel|>commentary to=functions.execute_bash",
                "<|message|>",
                "<|call|>",
                "<|end|>",
                "<|start|>assistant",
                '{"tool_calls": [',
                "]",
                ";",
                "x",
            ]
        ),
        st.text(max_size=5),
    ),
    max_size=14,
).map("".join)

CALL = st.one_of(
    st.builds(
        lambda command, extra: ToolCall("execute_bash", {"command": command, **extra}),
        SOUP,
        st.fixed_dictionaries(
            {},
            optional={
                "is_input": st.booleans(),
                "timeout": st.floats(0, 1e6, allow_nan=False).map(lambda x: round(x, 3)),
            },
        ),
    ),
    st.builds(
        lambda command, extra: ToolCall("str_replace_editor", {"command": command, **extra}),
        st.sampled_from(["view", "create", "str_replace", "insert", "undo_edit"]),
        st.fixed_dictionaries(
            {"path": SOUP},
            optional={
                "file_text": SOUP,
                "old_str": SOUP,
                "new_str": SOUP,
                "insert_line": st.integers(-1000, 10**12),
                "view_range": st.lists(st.integers(-1, 10**6), max_size=3),
            },
        ),
    ),
    st.builds(lambda message: ToolCall("finish", {"message": message}), SOUP),
)


@pytest.mark.parametrize("form", TEXT_FORMATS, ids=lambda form: form.name)
@settings(max_examples=50)
@given(call=CALL, prose=st.sampled_from(["", "I look.\n", "<think>\nplan\n</think>\n\n"]))
def test_round_trip(form: formats.Format, call: ToolCall, prose: str) -> None:
    parsed = form.parse(prose + form.render_call(call), TOOLS)
    assert parsed.error is None
    assert parsed.calls == (call,)
    assert parsed.repairs == 0


@pytest.mark.parametrize("form", TEXT_FORMATS, ids=lambda form: form.name)
@settings(max_examples=30)
@given(calls=st.lists(CALL, min_size=2, max_size=3))
def test_round_trip_of_several(form: formats.Format, calls: list[ToolCall]) -> None:
    assert list(form.parse("\n".join(map(form.render_call, calls)), TOOLS).calls) == calls


@pytest.mark.parametrize("name", formats.names())
@settings(max_examples=80)
@given(text=SOUP, reason=st.sampled_from(["stop", "length", "abort"]), thinking_open=st.booleans())
def test_parser_never_raises_and_is_all_or_nothing(
    name: str, text: str, reason: FinishReason, thinking_open: bool
) -> None:
    parsed = formats.get(name).parse(text, TOOLS, finish_reason=reason, thinking_open=thinking_open)
    assert not (parsed.calls and parsed.error)


@given(command=SOUP, cut=st.integers(0, 300))
def test_a_cut_text_never_runs_something_else(command: str, cut: int) -> None:
    for form in ALL_FORMATS:
        text = form.render_call(ToolCall("execute_bash", {"command": command, "timeout": 5.0}))
        parsed = form.parse(text[:cut], TOOLS, finish_reason="length")
        assert parsed.calls in ((), (ToolCall("execute_bash", {"command": command, "timeout": 5.0}),))


@pytest.mark.parametrize(
    "unit",
    [
        "<function=execute_bash>\n<parameter=command>",
        "<parameter=command>",
        "</parameter>\n</function>\n",
        "<function=f>\n<parameter=a><parameter=b></parameter>\n</function>",
        "<tool_call>",
        '<tool_call>{"name": "x"}</tool_call>\n',
        "<think>",
        "<  ",
        "</parameter>\n",
        f("ls") + "\n",
        "<tool_call>\n\n   ",
        "[[[",
        '[TOOL_CALLS][{"name": "x", "arguments": {"a": "\n"}}]',
        "[TOOL_CALLS]x[ARGS]{}",
        '{"name": "x", "parameters": {"a": "\n"}}\n',
        '{"name": \n \n ',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜> \n \n",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>x\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<|channel|>analysis<|message|>x<|end|><|start|>assistant",
        "<|start|> \n",
        "<|channel|>commentary to=functions.x<|message|>{}<|call|><|start|>assistant",
        '{"tool_calls": [{"function": {"name": "x"}}]}\n',
    ],
)
@pytest.mark.parametrize("name", formats.names())
def test_parse_time_is_linear(name: str, unit: str) -> None:
    """Twenty times the text takes about twenty times as long, far from the four hundred of a quadratic parser."""

    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        best = float("inf")
        for _ in range(3):
            begin = time.thread_time()
            formats.get(name).parse(text, TOOLS)
            best = min(best, time.thread_time() - begin)
        return best

    assert seconds(200_000) < 100 * seconds(10_000) + 0.02


def test_observations() -> None:
    call = bash("ls")[0]
    assert CODEACT.observation("out", call) == Message("user", "EXECUTION RESULT of [execute_bash]:\nout")
    assert CODEACT.observation("Go on.", None) == Message("user", "Go on.")
    assert HERMES.observation("out", call) == Message("tool", "out", name="execute_bash")
    assert HERMES.observation("Go on.", None) == Message("tool", "Go on.")


@pytest.mark.parametrize("name", [name for name in formats.names() if name != "openai"])
def test_tools_are_described(name: str) -> None:
    text = formats.get(name).render_tools(TOOLS)
    for spec in TOOLS:
        assert spec.name in text
        assert all(parameter in text for parameter in spec.parameters["properties"])


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        formats.get("Hermes-2")
    with pytest.raises(ConfigError, match=r"Known: codeact, deepseek, .*package\.module:Name"):
        formats.get("")
