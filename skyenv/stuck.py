"""When a policy repeats itself: pure bookkeeping over (tool, arguments, observation), fed after every call.

Invariants: thought text never counts, only the parsed call; observations compare by a digest in which what differs
between identical runs (durations, process ids, addresses, temporary names, clock times) is masked; polling a running
command counts only while nothing changes, and then needs `silent_polls` in a row. The state lives outside the
conversation, so rewriting history does not reset it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from dataclasses import dataclass

from skyenv.errors import ConfigError
from skyenv.types import ToolCall

_MASKS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?", "<date>"),
        (r"\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?\b", "<time>"),
        (r"\b\d+m\d+(?:\.\d+)?s\b", "<duration>"),
        (
            r"\b\d+(?:\.\d+)?(?:e-?\d+)?\s?(?:ns|us|µs|ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)\b",
            "<duration>",
        ),
        (r"\b0x[0-9a-fA-F]{4,16}\b", "<address>"),
        (r"\[\d+\][+-]? +\d+\b", "<pid>"),
        (r"(?i)\b(pid|process|job)([ =:#]{1,3})\d+\b", r"\1\2<pid>"),
        (r"\bpytest-\d+\b", "<temp>"),
        (r"\btmp[a-z0-9_]{8}\b", "<temp>"),
        (r"\btmp\.[A-Za-z0-9]{6,10}\b", "<temp>"),
    )
)


def call_key(call: ToolCall) -> str:
    """One string a call: the tool's name and its arguments in canonical JSON."""
    return f"{call.name} {json.dumps(dict(call.arguments), sort_keys=True, ensure_ascii=False, default=str)}"


def observation_digest(text: str) -> str:
    """Digest that is equal for observations that differ only in what two identical runs may differ in."""
    for pattern, name in _MASKS:
        text = pattern.sub(name, text)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_poll(call: ToolCall) -> bool:
    """Whether the call only looks at a running command: a `command` argument that is blank."""
    command = call.arguments.get("command")
    return isinstance(command, str) and not command.strip()


@dataclass(frozen=True, slots=True)
class StuckRule:
    """How often is too often; 0 switches a test off.

    `same_pairs`: equal call and observation in a row. `same_failures`: the same, when each failed. `same_calls`: equal
    call in a row whatever came back. `cycles`: repetitions of a pattern of 2 to `max_period` pairs. `silent_polls`:
    polls in a row that showed nothing new.
    """

    same_pairs: int = 4
    same_failures: int = 3
    same_calls: int = 0
    cycles: int = 3
    max_period: int = 3
    silent_polls: int = 10

    @property
    def window(self) -> int:
        """How many calls must be remembered."""
        return max(
            self.same_pairs,
            self.same_failures,
            self.same_calls,
            self.cycles * self.max_period,
            self.silent_polls,
            1,
        )


STRICT = StuckRule()
SKYRL = StuckRule(same_pairs=0, same_failures=0, same_calls=3, cycles=0, silent_polls=0)


def stuck_rule(name: str) -> StuckRule | None:
    """The preset of that name: `strict`, `skyrl` (three identical calls), or `off`. ConfigError otherwise."""
    presets = {"strict": STRICT, "skyrl": SKYRL, "off": None}
    if name not in presets:
        raise ConfigError(f"stuck: unknown preset {name!r}; choose one of {', '.join(presets)}")
    return presets[name]


@dataclass(frozen=True, slots=True)
class _Seen:
    key: str
    digest: str
    failed: bool
    poll: bool


class StuckDetector:
    """Remembers the last calls of one trajectory and says when a rule is met."""

    def __init__(self, rule: StuckRule) -> None:
        self._rule = rule
        self._seen: deque[_Seen] = deque(maxlen=rule.window)

    def add(self, call: ToolCall, observation: str, *, failed: bool = False) -> str | None:
        """Record a call and what came back; returns which rule it met, in words, or None."""
        self._seen.append(_Seen(call_key(call), observation_digest(observation), failed, is_poll(call)))
        return self._verdict()

    def clear(self) -> None:
        """Forget everything: after a warning the count starts anew."""
        self._seen.clear()

    def _verdict(self) -> str | None:
        rule, last = self._rule, self._seen[-1]
        if rule.same_calls and self._run_length(pairs=False) >= rule.same_calls:
            return f"the same call {rule.same_calls} times"
        repeats = self._run_length(pairs=True)
        if last.poll:
            silent = bool(rule.silent_polls) and repeats >= rule.silent_polls
            return f"{rule.silent_polls} polls without anything new" if silent else None
        if rule.same_failures and last.failed and repeats >= rule.same_failures:
            return f"the same failing call {rule.same_failures} times"
        if rule.same_pairs and repeats >= rule.same_pairs:
            return f"the same call with the same result {rule.same_pairs} times"
        return self._cycle()

    def _run_length(self, *, pairs: bool) -> int:
        """How many calls at the end equal the last one (with their observations when `pairs`)."""
        last, count = self._seen[-1], 0
        for seen in reversed(self._seen):
            if seen.key != last.key or (pairs and seen.digest != last.digest):
                break
            count += 1
        return count

    def _cycle(self) -> str | None:
        """A pattern of 2 to `max_period` different pairs, repeated to the end."""
        pairs = [(seen.key, seen.digest) for seen in self._seen]
        for period in range(2, self._rule.max_period + 1):
            length = period * self._rule.cycles
            tail = pairs[-length:]
            if not length or len(tail) < length or any(seen.poll for seen in list(self._seen)[-length:]):
                continue
            if len(set(tail[:period])) > 1 and tail == tail[:period] * self._rule.cycles:
                return f"a cycle of {period} calls {self._rule.cycles} times"
        return None
