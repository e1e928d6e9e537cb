"""What inference servers want to hear and how they answer: pure functions, one pair a dialect.

Every sampling parameter that changes the distribution is sent, also at its neutral value: servers take defaults from a
model's generation config otherwise, and logprobs would no longer be the policy's. An answer that is not what a
dialect promises raises EngineError that says which part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from skyenv.errors import EngineError
from skyenv.types import Completion, FinishReason, Message, NativeCall, SamplingParams, ToolSpec

Flavour = Literal["vllm", "sglang", "chat"]


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, before it is put into a server's words."""

    model: str
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    sampling: SamplingParams
    request_id: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where to post, what to post, how to read the answer, and where to post an abort (None: hanging up suffices)."""

    path: str
    body: Callable[[Request], dict[str, Any]]
    answer: Callable[[Any], Completion]
    abort_path: str | None = None


def vllm_body(request: Request) -> dict[str, Any]:
    """For `/v1/completions` with a prompt of token ids; vLLM 0.10.2 or later for `return_token_ids`."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": request.adapter or request.model,
        "prompt": list(request.prompt_ids),
        "request_id": request.request_id,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 1,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    return body if sampling.seed is None else {**body, "seed": sampling.seed}


def vllm_answer(body: Any) -> Completion:
    """One choice with `token_ids` and `logprobs.token_logprobs`."""
    choice = _part(body, "choices", 0)
    ids = _ids(_part(choice, "token_ids"), "choices[0].token_ids")
    logprobs = _logprobs(_part(choice, "logprobs", "token_logprobs"), "choices[0].logprobs.token_logprobs")
    completion = _completion(_text(choice, "text"), ids, logprobs, _part(choice, "finish_reason"))
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return replace(completion, cached_tokens=_count(details, "cached_tokens"))


def sglang_body(request: Request) -> dict[str, Any]:
    """For `/generate` with input ids."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body = {
        "rid": request.request_id,
        "input_ids": list(request.prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }
    return {**body, "lora_path": request.adapter} if request.adapter else body


def sglang_answer(body: Any) -> Completion:
    """Ids and logprobs from `meta_info.output_token_logprobs`, triples of logprob, id and text; versions by token."""
    meta = _part(body, "meta_info")
    reason = _part(meta, "finish_reason", "type")
    triples = meta.get("output_token_logprobs", []) if reason == "abort" else _part(meta, "output_token_logprobs")
    if not isinstance(triples, list) or not all(isinstance(t, list) and len(t) >= 2 for t in triples):
        raise EngineError("the answer's meta_info.output_token_logprobs is not a list of triples")
    ids = _ids([triple[1] for triple in triples], "meta_info.output_token_logprobs")
    logprobs = _logprobs([triple[0] for triple in triples], "meta_info.output_token_logprobs")
    counted = meta.get("completion_tokens", len(ids))
    if counted != len(ids):
        raise EngineError(f"the answer counts {counted!r} completion tokens and has {len(ids)}")
    versions = _spans(meta.get("weight_versions"), len(ids)) or _spans(
        [{"version": meta.get("weight_version")}], len(ids)
    )
    completion = _completion(_text(body, "text"), ids, logprobs, reason)
    oldest = min((version for _count, version in versions), default=0)
    changed = versions if len(versions) > 1 else ()
    return replace(completion, policy_version=oldest, versions=changed, cached_tokens=_count(meta, "cached_tokens"))


def chat_body(request: Request) -> dict[str, Any]:
    """For `/v1/chat/completions` anywhere: text only; tool results without a call's id go as user messages.

    Tools that the first message carries are offered to the server's own tool calling.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_chat_message(message) for message in request.messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if request.messages and request.messages[0].tools:
        body["tools"] = [_function(spec) for spec in request.messages[0].tools]
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    return body if sampling.seed is None else {**body, "seed": sampling.seed}


def chat_answer(body: Any) -> Completion:
    """The first choice's content and tool calls; no ids of tokens."""
    choice = _part(body, "choices", 0)
    message = _part(choice, "message")
    content = _part(choice, "message").get("content")
    if content is not None and not isinstance(content, str):
        raise EngineError("the answer's choices[0].message.content is not text")
    cut = choice.get("finish_reason") == "length"
    calls = _native_calls(message.get("tool_calls") or [])
    return Completion(content or "", finish_reason="length" if cut else "stop", calls=calls)


def resent(call: NativeCall) -> dict[str, Any]:
    """A reported call as it is sent back: servers choke on arguments that are no JSON object."""
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    try:
        whole = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        empty = call.arguments is None or not arguments.strip()
        arguments = "{}" if empty else json.dumps({"invalid_arguments": arguments}, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


DIALECTS: Mapping[Flavour, Dialect] = MappingProxyType(
    {
        "vllm": Dialect("/v1/completions", vllm_body, vllm_answer),
        "sglang": Dialect("/generate", sglang_body, sglang_answer, "/abort_request"),
        "chat": Dialect("/v1/chat/completions", chat_body, chat_answer),
    }
)


def _chat_message(message: Message) -> dict[str, Any]:
    if message.role == "tool" and message.call_id:
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.content}
    sent: dict[str, Any] = {
        "role": "user" if message.role == "tool" else message.role,
        "content": message.content,
    }
    if message.calls:
        sent["tool_calls"] = [resent(call) for call in message.calls]
    return sent


def _function(spec: ToolSpec) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}
    return {"type": "function", "function": function}


def _native_calls(values: Any) -> tuple[NativeCall, ...]:
    """Reported calls; each gets an id of its own, so that each can be answered."""
    if not isinstance(values, list):
        raise EngineError("the answer's choices[0].message.tool_calls is not a list")
    calls: list[NativeCall] = []
    for number, value in enumerate(values):
        function = _part(value, "function")
        name = _text(function, "name")
        id = value.get("id")
        taken = not isinstance(id, str) or not id or any(call.id == id for call in calls)
        calls.append(NativeCall(f"call_{number}" if taken else str(id), name, function.get("arguments")))
    return tuple(calls)


def _part(value: Any, *path: str | int) -> Any:
    """`value` at `path`; EngineError naming the first step that is missing."""
    for position, key in enumerate(path):
        known = isinstance(value, dict) if isinstance(key, str) else isinstance(value, list)
        present = known and (key in value if isinstance(key, str) else len(value) > key)
        if not present:
            where = ".".join(str(step) for step in path[: position + 1])
            raise EngineError(f"the answer has no {where}: {str(value)[:200]}")
        value = value[key]
    return value


def _text(value: Any, key: str) -> str:
    text = _part(value, key)
    if not isinstance(text, str):
        raise EngineError(f"the answer's {key} is not text")
    return text


def _count(value: Any, key: str) -> int | None:
    """A number that a server may tell; nothing when it does not, or tells something else."""
    count = value.get(key) if isinstance(value, dict) else None
    return count if type(count) is int and count >= 0 else None


def _spans(values: Any, size: int) -> tuple[tuple[int, int], ...]:
    """How many ids each version sampled; nothing when a version is not one of ours, as before the first update."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        return ()
    found: list[tuple[int, int]] = []
    for value in values:
        version, start, end = str(value.get("version")), value.get("start", 0), value.get("end", size)
        if not version.isdecimal() or type(start) is not int or type(end) is not int:
            return ()
        if end > start:
            found.append((end - start, int(version)))
    return tuple(found) if sum(count for count, _version in found) == size else ()


def _ids(values: Any, where: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise EngineError(f"the answer's {where} is not a list of token ids")
    return tuple(values)


def _logprobs(values: Any, where: str) -> tuple[float, ...]:
    numbers = isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    if not numbers:
        raise EngineError(f"the answer's {where} is not a list of finite numbers")
    return tuple(float(value) for value in values)


def _completion(text: str, ids: Sequence[int], logprobs: Sequence[float], reason: Any) -> Completion:
    if len(ids) != len(logprobs):
        raise EngineError(f"the answer has {len(ids)} token ids and {len(logprobs)} logprobs")
    reasons: dict[Any, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if reason not in reasons:
        raise EngineError(f"the answer's finish reason is {reason!r}")
    return Completion(text, tuple(ids), tuple(logprobs), reasons[reason])
