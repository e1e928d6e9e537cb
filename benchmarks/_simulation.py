"""A cluster on a laptop: an environment and engines that spend the times of a trace, in virtual time.

The pipeline is the product's own, with a real renderer and turn loop; only sleeping is simulated, so that a day of a
thousand sandboxes takes minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Any

import anyio
from _traces import Script
from trio.testing import MockClock

from skyenv import formats
from skyenv.core import Env
from skyenv.errors import EngineError, EngineUnavailable, SandboxLost, SandboxUnavailable
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.types import Completion, Message, SamplingParams, Step, ToolCall, ToolSpec
from skyenv.vector.lanes import Lane

TOOLS = (
    ToolSpec("work", "Work on.", {"type": "object", "properties": {}}),
    ToolSpec("finish", "End.", {"type": "object", "properties": {}}),
)
RENDERER = Renderer(ByteTokenizer(), formats.get("codeact"))
DEAD_SECONDS = 600.0


class Share:
    """How much of something is in use: now, at most, and its integral over time."""

    def __init__(self) -> None:
        self.value = self.most = 0
        self._area = self._since = 0.0

    def add(self, change: int) -> None:
        """So much more or less from now on."""
        self._area, self._since = self.area(), anyio.current_time()
        self.value += change
        self.most = max(self.most, self.value)

    def area(self) -> float:
        """The integral until now."""
        return self._area + self.value * (anyio.current_time() - self._since)


class Engines:
    """Several engines of `slots` sequences each, and what is counted of a run: slots in use, living sandboxes.

    A request goes where most slots are free. Engines that `die` lose what they serve and refuse what comes.
    """

    def __init__(self, engines: int, slots: int) -> None:
        self.lanes = [Lane(slots) for _ in range(engines)]
        self.slots = engines * slots
        self.busy, self.live = Share(), Share()
        self._serving: list[set[anyio.CancelScope]] = [set() for _ in range(engines)]
        self._dead: set[int] = set()

    async def die(self, share: float, seed: int, within: float) -> None:
        """Let a share of the engines die once each, at random moments, for `DEAD_SECONDS`."""
        chosen = random.Random(f"deaths {seed}")

        async def one(number: int, moment: float) -> None:
            await anyio.sleep(moment)
            self._dead.add(number)
            for scope in self._serving[number]:
                scope.cancel()
            await anyio.sleep(DEAD_SECONDS)
            self._dead.discard(number)

        async with anyio.create_task_group() as group:
            for number in chosen.sample(range(len(self.lanes)), round(share * len(self.lanes))):
                group.start_soon(one, number, chosen.uniform(0.0, within))

    async def serve(self, script: Script, turn: int, *, avoid_dead: bool = False) -> None:
        """One generation of a script. EngineUnavailable when its engine is dead or dies."""
        numbers = [number for number in range(len(self.lanes)) if not (avoid_dead and number in self._dead)]
        if not numbers:
            raise EngineUnavailable("all engines are dead")
        number = min(numbers, key=lambda number: self.lanes[number].busy + self.lanes[number].waiting)
        async with self.lanes[number].slot():
            if number in self._dead:
                raise EngineUnavailable("the engine is dead")
            self.busy.add(1)
            with anyio.CancelScope() as scope:
                self._serving[number].add(scope)
                try:
                    await script.spend(f"generate{turn}", script.generate[turn], EngineError("the engine failed"))
                finally:
                    self._serving[number].discard(scope)
                    self.busy.add(-1)
            if scope.cancelled_caught:
                raise EngineUnavailable("the engine died")


class SimulatedEngine:
    """The `Engine` that the product's pipeline sees: the script of a session is found by its task.

    As an `EnginePool` does, it sends a request elsewhere when its engine dies.
    """

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
        last = len(script.generate) - 1
        await self._serve(script, min(turn, last))
        ids = self._answers["finish" if turn >= last else "work"]
        return Completion(RENDERER.decode(ids), ids, (0.0,) * len(ids))

    async def _serve(self, script: Script, turn: int) -> None:
        while True:
            try:
                return await self._engines.serve(script, turn, avoid_dead=True)
            except EngineUnavailable:
                await anyio.sleep(1.0)


class SimulatedEnv(Env):
    """The environment of the product's pipeline: init, tools and evaluation take the script's times."""

    tools = TOOLS

    def __init__(self, scripts: Mapping[str, Script], live: Share) -> None:
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
        self._live.add(1)
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
            self._live.add(-1)


def virtual(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run in virtual time: sleeping costs nothing."""
    return anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
