"""Tools as agents bring them: several calls at once, any schema, in namespaces, a provider's own."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from skyenv.types import ToolCall
from tests.recorder.test_hostile import headers
from tests.recorder.test_recorder import CALL, LS, RENDERER, USER, chat_tools, opened, turn

CALLS = "\n".join(RENDERER.format.render_call(ToolCall("ls", {"path": path})) for path in ("/a", "/b"))


async def test_parallel_calls_in_every_dialect() -> None:
    """Two calls in one answer, whose results come back in the other order; one segment."""
    async with opened(turn([CALLS, "done"])) as o:
        for stream in (False, True):
            kept = await _two_calls(o, stream)
            results = [{"role": "tool", "tool_call_id": call["id"], "content": call["id"][-4:]} for call in kept][::-1]
            message = {"role": "assistant", "content": None, "tool_calls": kept}
            answer = await o.chat([USER, message, *results], tools=chat_tools())
            assert answer.choices[0].message.content == "done"
    counters = o.session.trajectory.counters
    assert (len(o.session.trajectory.segments), counters["conversations"], counters.get("forks", 0)) == (2, 2, 0)
    async with opened(turn([CALLS, "done"])) as o:
        tool = {"type": "function", **LS}
        async with o.openai.responses.stream(model="m", input=[USER], tools=[tool]) as stream:
            items = (await stream.get_final_response()).output
        assert [json.loads(item.arguments)["path"] for item in items] == ["/a", "/b"]
        outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "x"} for item in items]
        history = [USER, *[item.model_dump(exclude_none=True) for item in items], *outputs]
        assert (await o.openai.responses.create(model="m", input=history, tools=[tool])).output_text == "done"
    assert len(o.session.trajectory.segments) == 1
    async with opened(turn([CALLS, "done"])) as o:
        options: dict[str, Any] = {"model": "m", "max_tokens": 500}
        options["tools"] = [{"name": "ls", "description": "List files.", "input_schema": LS["parameters"]}]
        async with o.anthropic.messages.stream(messages=[USER], **options) as stream:
            uses = (await stream.get_final_message()).content
        assert [use.input for use in uses] == [{"path": "/a"}, {"path": "/b"}]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": use.id} for use in uses]
        history: list[Any] = [USER, {"role": "assistant", "content": [use.model_dump() for use in uses]}]
        history.append({"role": "user", "content": results})
        answer = await o.anthropic.messages.create(messages=history, **options)
        assert answer.content[0].text == "done"
    assert len(o.session.trajectory.segments) == 1


async def _two_calls(o: Any, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        message = (await o.chat([USER], tools=chat_tools())).choices[0].message
        return [call.model_dump(exclude_none=True) for call in message.tool_calls]
    found: dict[int, dict[str, Any]] = {}
    async for chunk in await o.chat([USER], tools=chat_tools(), stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            found[call.index] = call.model_dump(exclude_none=True, exclude={"index"})
    return list(found.values())


SCHEMAS: dict[str, Any] = {
    "no type": {},
    "properties of another kind": {"type": "object", "properties": 5},
    "a property of another kind": {"type": "object", "properties": {"path": 5}},
    "required of another kind": {"type": "object", "properties": {"path": {"type": "string"}}, "required": 7},
    "a type that is none": {"type": "object", "properties": {"path": {"type": 7}}},
    "several types": {"type": "object", "properties": {"path": {"type": ["string", "null"]}}},
    "alternatives": {"type": "object", "properties": {"path": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
    "a reference": {"type": "object", "properties": {"path": {"$ref": "#/$defs/p"}}, "$defs": {"p": {}}},
    "old tuples": {"type": "object", "properties": {"path": {"type": "array", "items": [{"type": "string"}, 5]}}},
    "anything": {"type": "object", "properties": {"path": True}},
    "a set of values": {"type": "object", "properties": {"path": {"enum": 5}}},
    "a list": {"type": "array"},
    "a surrogate": {"type": "object", "properties": {"path": {"type": "string", "description": "\ud800"}}},
}


async def test_tools_of_any_schema() -> None:
    """Answered or refused as the client's mistake, never an error of the endpoint's."""
    async with opened(lambda _: CALL) as o, httpx.AsyncClient(base_url=o.url) as client:
        for kind, schema in SCHEMAS.items():
            before = len(o.session.trajectory.turns)
            tool = {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": schema}}
            body = json.dumps({"messages": [USER], "tools": [tool]})
            answer = await client.post("/v1/chat/completions", content=body, headers=headers(o))
            refused = kind.endswith("of another kind")
            assert answer.status_code == (400 if refused else 200), (kind, answer.text)
            if refused:
                assert "tools[0].function.parameters: must be" in answer.json()["error"]["message"]
            assert len(o.session.trajectory.turns) == before + (not refused)


async def test_arguments_are_what_the_schema_lets_them_be() -> None:
    """As strict modes and programs in other languages want them: null where it may stand, whole numbers whole."""
    optional = {"type": ["string", "null"]}
    properties = {
        "path": optional,
        "also": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "wait": {"type": "number"},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    said = RENDERER.format.render_call(ToolCall("ls", {"path": None, "also": None, "wait": 2000}))
    other = RENDERER.format.render_call(ToolCall("any", {"x": [1]}))
    loose = {"name": "any", "parameters": {"type": "object", "additionalProperties": True}}
    tools: list[Any] = [{"type": "function", "function": {"name": "ls", "parameters": schema}}]
    tools.append({"type": "function", "function": loose})
    async with opened(lambda _: f"{said}\n{other}") as o:
        calls = (await o.chat([USER], tools=tools)).choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == [
        '{"path": null, "also": null, "wait": 2000}',
        '{"x": [1]}',
    ]


async def test_tools_that_a_provider_would_run_are_left_out() -> None:
    """Agents name them unasked and do without; those whose arguments only a provider's models know are refused."""
    async with opened(lambda _: "yes") as o:
        options: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
        await o.anthropic.messages.create(tools=[{"type": "web_search_20250305", "name": "web_search"}], **options)
        await o.openai.responses.create(model="m", input="what?", tools=[{"type": "web_search"}])
        assert o.session.trajectory.counters["ignored_parameters"] == 2
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type: is 'bash_20250124'"):
            await o.anthropic.messages.create(tools=[{"type": "bash_20250124", "name": "bash"}], **options)
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\].type: is 'local_shell'"):
            await o.openai.responses.create(model="m", input="what?", tools=[{"type": "local_shell"}])


async def test_arguments_that_do_not_fit_are_the_agents_to_complain_of() -> None:
    """As with any server; the agent's answer brings the model back, where bare text would end the agent."""
    said = RENDERER.format.render_call(ToolCall("ls", {"path": 5, "dir": "/"}))
    async with opened(turn([said, "I see."])) as o:
        message = (await o.chat([USER], tools=chat_tools())).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"path": 5, "dir": "/"}
        complaint = {"role": "tool", "tool_call_id": call.id, "content": "path must be text"}
        await o.chat([USER, message.model_dump(exclude_none=True), complaint], tools=chat_tools())
    trajectory = o.session.trajectory
    assert (len(trajectory.segments), trajectory.counters["parse_errors"]) == (1, 1)
    assert "dir" in (trajectory.turns[0].error or "")


async def test_tools_in_a_namespace() -> None:
    """As command-line agents send their helpers' tools: the model calls `NAMESPACE.NAME`, the client hears both."""
    said = RENDERER.format.render_call(ToolCall("files.ls", {"path": "/"}))
    async with opened(turn([said, "done"])) as o, httpx.AsyncClient(base_url=o.url) as client:
        tools = [{"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", **LS}]}]
        history: list[Any] = [{"role": "user", "content": "what?"}]
        answer = await client.post("/v1/responses", json={"input": history, "tools": tools}, headers=headers(o))
        (call,) = answer.json()["output"]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "files", "ls")
        history += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "a"}]
        answer = await client.post("/v1/responses", json={"input": history, "tools": tools}, headers=headers(o))
        assert answer.json()["output"][0]["content"][0]["text"] == "done"
        nested = [{**tools[0], "tools": tools}]
        answer = await client.post("/v1/responses", json={"input": history, "tools": nested}, headers=headers(o))
        assert "tools[0].tools[0].type: is 'namespace'" in answer.json()["error"]["message"]
    assert len(o.session.trajectory.segments) == 1
