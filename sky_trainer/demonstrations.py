"""Files of demonstrations, whoever gave them, as one kind of value. Nothing is tokenised or judged here.

A line of a JSON Lines file, or a row of a parquet file or saved dataset, is one of three things: a trajectory as
`skyenv.trajectory_io` writes it, a row as `sky_trainer rollout --export` writes it, or a transcript, an object with
`messages` in the shape of the chat interface. Of a transcript, `tools`, `reward` and `resolved` are read where they
are there; one without tool messages or calls beside its text is taken to say everything in its messages, the tools
and the form of their results included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skyenv.errors import ConfigError, boundary
from skyenv.trajectory_io import trajectory_from_json
from skyenv.types import Message, Segment, ToolCall, ToolSpec


class Said(NamedTuple):
    """One answer: its text, the calls beside the text or read from it, and what came back for which call."""

    text: str
    calls: tuple[ToolCall, ...]
    results: tuple[tuple[str, ToolCall | None], ...]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """`segments` holds sampled ids where they were recorded. `tools` None: those of the environment.

    `whole`: the messages say everything, so that nothing is described or wrapped. `beside`: calls stand beside the
    text of the answers and not in it. `failed`: infrastructure spoiled it.
    """

    source: str
    prompt: tuple[Message, ...]
    said: tuple[Said, ...]
    segments: tuple[Segment, ...] = ()
    tools: tuple[ToolSpec, ...] | None = None
    whole: bool = False
    beside: bool = False
    reward: float | None = None
    resolved: bool | None = None
    failed: bool = False


def read_demonstrations(paths: Sequence[str]) -> Iterator[Demonstration]:
    """Everything in these files, in order. ConfigError names the file and line that cannot be read."""
    for path in map(Path, paths):
        for source, row in _rows(path):
            with boundary(ConfigError, f"sft.data: {source} is no trajectory, exported row or transcript"):
                yield demonstration_of(source, row)


def demonstration_of(source: str, row: Mapping[str, Any]) -> Demonstration:
    """The demonstration in one row; `source` names it in messages. KeyError, TypeError or ValueError for others."""
    if "segments" in row and "turns" in row:
        return _of_trajectory(source, row)
    if "token_ids" in row and "loss_mask" in row:
        return _of_export(source, row)
    return _of_transcript(source, row)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix == ".jsonl":
        yield from _lines(path)
        return
    from datasets import Dataset, load_from_disk

    if not path.exists() or not (path.is_dir() or path.suffix == ".parquet"):
        raise ConfigError(f"sft.data: {path} must be a .jsonl or .parquet file or a saved dataset's directory")
    with boundary(ConfigError, f"sft.data: cannot read {path}"):
        dataset = load_from_disk(str(path)) if path.is_dir() else Dataset.from_parquet(str(path))
    for number, row in enumerate(dataset, start=1):
        yield f"{path} row {number}", row


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    with boundary(ConfigError, f"sft.data: {path} line {number} is not JSON"):
                        yield f"{path} line {number}", json.loads(line)
    except OSError as error:
        raise ConfigError(f"sft.data: cannot read {path}: {error.strerror}") from error


def _of_trajectory(source: str, row: Mapping[str, Any]) -> Demonstration:
    trajectory = trajectory_from_json(row)
    said = tuple(
        Said(turn.text, turn.calls, ((turn.observation, turn.calls[0] if turn.calls else None),))
        for turn in trajectory.turns
    )
    return Demonstration(
        source,
        trajectory.prompt,
        said,
        tuple(segment for segment in trajectory.segments if 1 in segment.loss_mask) if trajectory.exact else (),
        reward=trajectory.reward,
        resolved=bool(trajectory.verdict.get("resolved")),
        failed=trajectory.failure is not None,
    )


def _of_export(source: str, row: Mapping[str, Any]) -> Demonstration:
    """Only its ids teach, since the messages are those of the whole trajectory and stand on each of its rows."""
    texts = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    segment = Segment(list(row["token_ids"]), list(row["loss_mask"]), [0.0] * len(row["token_ids"]))
    segment.check()
    said = tuple(Said(text, (), ()) for text in texts)
    return Demonstration(source, (), said, (segment,), reward=row["reward"], resolved=row["resolved"])


def _of_transcript(source: str, row: Mapping[str, Any]) -> Demonstration:
    messages = row["messages"]
    if not isinstance(messages, list) or not any(message["role"] == "assistant" for message in messages):
        raise ValueError("it has no message of role assistant")
    start = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    reward = row.get("reward")
    return Demonstration(
        source,
        tuple(Message(message["role"], _content(message)) for message in messages[:start]),
        tuple(_said(messages[start:])),
        tools=_tools(row.get("tools")),
        whole=not any(message["role"] == "tool" or message.get("tool_calls") for message in messages),
        beside=any(message.get("tool_calls") for message in messages),
        reward=None if reward is None else float(reward),
        resolved=row.get("resolved"),
    )


def _said(messages: Sequence[Mapping[str, Any]]) -> Iterator[Said]:
    """Each answer with all that stands before the next. ValueError for two answers in a row."""
    position = 0
    while position < len(messages):
        answer, calls, results = messages[position], dict[str, ToolCall](), list[tuple[str, ToolCall | None]]()
        if answer["role"] != "assistant":
            raise ValueError("a message of role assistant must come first")
        for number, written in enumerate(answer.get("tool_calls") or ()):
            function, name = written["function"], str(written.get("id") or number)
            arguments = function["arguments"]
            calls[name] = ToolCall(function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
        waiting = list(calls.values())
        position += 1
        while position < len(messages) and (message := messages[position])["role"] != "assistant":
            call = None
            if message["role"] == "tool" and waiting:
                call = calls.get(str(message.get("tool_call_id")), waiting[0])
                waiting.remove(call)
            results.append((_content(message), call))
            position += 1
        if not results and position < len(messages):
            raise ValueError("two messages of role assistant follow each other")
        yield Said(_content(answer), tuple(calls.values()), tuple(results))


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, thinking in front of it."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    thought = message.get("reasoning_content")
    return f"<think>\n{thought}\n</think>\n\n{content}" if thought else content


def _tools(given: Any) -> tuple[ToolSpec, ...] | None:
    if not given:
        return None
    functions = [tool.get("function", tool) for tool in (json.loads(given) if isinstance(given, str) else given)]
    return tuple(ToolSpec(f["name"], f.get("description") or "", f.get("parameters") or {}) for f in functions)
