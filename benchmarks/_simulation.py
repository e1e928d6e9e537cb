"""A cluster on a laptop: traces of stage times, an environment and engines that spend them, virtual time.

A trace says for each trajectory how long its init, every generation, every tool call and its evaluation take, and which
of them fails or hangs. All schedulers play the same trace. The pipeline is the product's own, with a real renderer and
turn loop; only sleeping is simulated, so that a day of a thousand sandboxes takes seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import anyio
from trio.testing import MockClock

from skyenv import formats
from skyenv.core import Env
from skyenv.errors import EngineError, SandboxLost, SandboxUnavailable
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.types import Completion, Message, SamplingParams, Step, ToolCall, ToolSpec
from skyenv.vector.lanes import Lane

TOOLS = (
    ToolSpec("work", "Work on.", {"type": "object", "properties": {}}),
    ToolSpec("finish", "End.", {"type": "object", "properties": {}}),
)
RENDERER = Renderer(ByteTokenizer(), formats.get("codeact"))
FOREVER = 1e12


@dataclass(frozen=True, slots=True)
class Shape:
    """Stated distributions, in seconds: log-normal with this median and sigma; turns uniform between two bounds.

    The default is a SWE task: generation dominates, tools and inits have long tails. `faults` is the share of
    trajectories that fail once somewhere, `hangs` the share that hang once.
    """

    init: tuple[float, float] = (8.0, 0.6)
    generate: tuple[float, float] = (6.0, 0.7)
    tool: tuple[float, float] = (0.8, 1.2)
    evaluate: tuple[float, float] = (25.0, 0.7)
    turns: tuple[int, int] = (5, 35)
    faults: float = 0.0
    hangs: float = 0.0


@dataclass(slots=True)
class Script:
    """One trajectory of a trace. `trouble` maps a place to `fault` or `hang`, and is used up when it strikes."""

    init: float
    generate: list[float]
    tool: list[float]
    evaluate: float
    trouble: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of all of it, one after the other."""
        return self.init + sum(self.generate) + sum(self.tool) + self.evaluate

    async def spend(self, place: str, seconds: float, error: Exception) -> None:
        """Take the time of a place, or fail or hang there the first time."""
        trouble = self.trouble.pop(place, None)
        await anyio.sleep(FOREVER if trouble == "hang" else seconds)
        if trouble is not None:
            raise error


def draw_trace(shape: Shape, count: int, seed: int) -> list[Script]:
    """`count` trajectories; the same for the same seed."""
    chosen = random.Random(seed)
    time = lambda median, sigma: median * chosen.lognormvariate(0.0, sigma)  # noqa: E731
    trace = []
    for _number in range(count):
        turns = chosen.randint(*shape.turns)
        script = Script(
            time(*shape.init),
            [time(*shape.generate) for _ in range(turns)],
            [time(*shape.tool) for _ in range(turns)],
            time(*shape.evaluate),
        )
        for kind, share in (("fault", shape.faults), ("hang", shape.hangs)):
            if chosen.random() < share:
                script.trouble[chosen.choice(("init", f"generate{turns // 2}", f"tool{turns // 2}", "evaluate"))] = kind
        trace.append(script)
    return trace


class Engines:
    """Several engines of `slots` sequences each, as one `Engine`; a request goes where most slots are free."""

    def __init__(self, engines: int, slots: int) -> None:
        self.lanes = [Lane(slots) for _ in range(engines)]
        self.slots = engines * slots
        self.busy_seconds = 0.0

    async def serve(self, script: Script, turn: int) -> None:
        """One generation of a script."""
        lane = min(self.lanes, key=lambda lane: lane.busy + lane.waiting)
        async with lane.slot():
            started = anyio.current_time()
            try:
                await script.spend(f"generate{turn}", script.generate[turn], EngineError("the engine died"))
            finally:
                self.busy_seconds += anyio.current_time() - started


class SimulatedEngine:
    """The `Engine` that the product's pipeline sees: the script of a session is found by its task and turn."""

    def __init__(self, engines: Engines, scripts: Mapping[str, Script]) -> None:
        self._engines, self._scripts = engines, scripts
        self._answers = {
            name: (*RENDERER.encode(RENDERER.format.render_call(ToolCall(name, {}))), RENDERER.stop_token_ids[0])
            for name in ("work", "finish")
        }

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """Spend the time of the turn and call `work`, or `finish` in the last one."""
        script = self._scripts[session_id.rpartition("#")[0]]
        turn = sum(message.role == "assistant" for message in messages)
        await self._engines.serve(script, min(turn, len(script.generate) - 1))
        ids = self._answers["finish" if turn >= len(script.generate) - 1 else "work"]
        return Completion(RENDERER.decode(ids), ids, (0.0,) * len(ids))


class SimulatedEnv(Env):
    """The environment of the product's pipeline: init, tools and evaluation take the script's times."""

    tools = TOOLS

    def __init__(self, scripts: Mapping[str, Script], live: Callable[[int], None]) -> None:
        self._scripts, self._live = scripts, live
        self._task, self._turn, self._open = "", 0, False

    @cached_property
    def prompt(self) -> tuple[Message, ...]:
        """The task's id is all there is to say."""
        return (Message("system", self._task), Message("user", "Work."))

    @property
    def _script(self) -> Script:
        return self._scripts[self._task]

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start."""
        self._task, self._open = (options or {})["task"], True
        self._live(1)
        await self._script.spend("init", self._script.init, SandboxUnavailable("no sandbox", 1.0))
        return "ready", {}

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        """One tool call."""
        turn, self._turn = self._turn, self._turn + 1
        script = self._script
        await script.spend(f"tool{turn}", script.tool[min(turn, len(script.tool) - 1)], SandboxLost("it died"))
        return Step("ok", 0.0, isinstance(action, ToolCall) and action.name == "finish", False, {})

    async def aevaluate(self) -> tuple[float | None, dict[str, Any]]:
        """The grader."""
        await self._script.spend("evaluate", self._script.evaluate, SandboxLost("it died"))
        return 1.0, {}

    async def aclose(self) -> None:
        """End."""
        if self._open:
            self._open = False
            self._live(-1)


def virtual(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run in virtual time: sleeping costs nothing."""
    return anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
