"""A small text adventure as environment: real rules, and a plan of how long its phases take and how they fail.

A cave of numbered rooms; `go` moves, `dig` works once in the room of the treasure, `finish` ends. Reward 1 for the
treasure. A ledger counts which environments are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from trio.testing import MockClock

from skyenv import formats
from skyenv.core import Env
from skyenv.errors import ResetNeeded
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.types import Message, Step, ToolCall, ToolSpec

TOOLS = (
    ToolSpec(
        "go",
        "Walk to a room.",
        {"type": "object", "properties": {"room": {"type": "integer"}}, "required": ["room"]},
    ),
    ToolSpec("dig", "Dig here.", {"type": "object", "properties": {}}),
    ToolSpec("finish", "End the game.", {"type": "object", "properties": {}}),
)


@dataclass(frozen=True)
class Quest:
    """A task: where the treasure lies."""

    task_id: str
    treasure: int = 3


@dataclass(frozen=True)
class Plan:
    """Seconds each phase takes, and what it raises at its end."""

    init: float = 0.0
    step: float = 0.0
    evaluate: float = 0.0
    close: float = 0.0
    init_error: Exception | None = None
    step_error: Exception | None = None
    evaluate_error: Exception | None = None
    close_error: Exception | None = None
    valid: bool = True


@dataclass
class Ledger:
    """Which environments hold something: from the start of `areset` to the end of `aclose`."""

    live: int = 0
    peak: int = 0
    made: int = 0
    closed: int = 0
    seeds: list[int | None] = field(default_factory=list)


class Adventure(Env):
    def __init__(self, ledger: Ledger | None = None, plan: Callable[[str], Plan] = lambda task_id: Plan()) -> None:
        self._ledger, self._planned = ledger or Ledger(), plan
        self._plan = Plan()
        self._ledger.made += 1
        self._quest: Quest | None = None
        self._held = self._closed = self._found = self._over = False
        self._room = 1

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return TOOLS

    @property
    def prompt(self) -> tuple[Message, ...]:
        if self._quest is None:
            raise ResetNeeded("reset first")
        return (
            Message("system", "You explore a cave."),
            Message("user", f"{self._quest.task_id}: find the treasure."),
        )

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        task = (options or {}).get("task", "cave")
        quest = Quest(task) if isinstance(task, str) else task
        self._plan = self._planned(quest.task_id)
        self._held = True
        self._ledger.seeds.append(seed)
        self._ledger.live += 1
        self._ledger.peak = max(self._ledger.peak, self._ledger.live)
        await self._spend(self._plan.init, self._plan.init_error)
        self._quest, self._found, self._over, self._room = quest, False, False, 1
        return "You stand in room 1.", {"task_id": quest.task_id}

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        if self._quest is None or self._over:
            raise ResetNeeded("reset first")
        call = action if isinstance(action, ToolCall) else ToolCall(action["name"], action["arguments"])
        await self._spend(self._plan.step, self._plan.step_error)
        if call.name == "finish":
            self._over = True
            return Step("You leave.", 0.0, True, False, {})
        if call.name == "go":
            self._room = int(call.arguments["room"])
            return Step(f"You stand in room {self._room}.", 0.0, False, False, {})
        if self._room != self._quest.treasure:
            return Step("Nothing but stones.", 0.0, False, False, {"failed": True})
        self._found = True
        return Step("You found the treasure!", 0.0, False, False, {})

    async def aevaluate(self) -> tuple[float | None, dict[str, Any]]:
        await self._spend(self._plan.evaluate, self._plan.evaluate_error)
        reward = float(self._found) if self._plan.valid else None
        return reward, {"resolved": self._found, "valid_for_training": self._plan.valid}

    async def aclose(self) -> None:
        if self._closed:
            return
        if self._held:
            await self._spend(self._plan.close, self._plan.close_error)
            self._held = False
            self._ledger.live -= 1
        self._closed = True
        self._ledger.closed += 1

    async def _spend(self, seconds: float, error: Exception | None) -> None:
        await anyio.sleep(seconds)
        if error is not None:
            raise error


RENDERER = Renderer(ByteTokenizer(), formats.get("codeact"))


def say(*calls: ToolCall, thought: str = "") -> str:
    """What a model writes to make these calls."""
    return "\n".join([thought, *(RENDERER.format.render_call(call) for call in calls)]).strip()


def go(room: int) -> ToolCall:
    return ToolCall("go", {"room": room})


DIG, END = ToolCall("dig", {}), ToolCall("finish", {})
WIN = (say(go(3)), say(DIG), say(END))
LOSE = (say(go(2)), say(END))


def virtual(main: Callable[[], Any]) -> Any:
    """Run an async function in virtual time: sleeping costs nothing and clocks are exact."""
    return anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
