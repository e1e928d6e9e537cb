"""What can go wrong with a vector of environments: hangs, failures, interrupts, odd arguments, closing at any time."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from skyenv.core import Env
from skyenv.errors import ConfigError, DeadlineExceeded, ResetNeeded, SandboxLost
from skyenv.spaces import ToolCallSpace, Unicode
from skyenv.vector.vector_env import SkyVectorEnv
from tests.rollout.adventure import DIG, END, TOOLS, Adventure, Ledger, Plan, go

FOREVER = 1e9


def vector(
    ledger: Ledger, count: int = 2, plan: Callable[[str], Plan] = lambda task_id: Plan(), **options: Any
) -> SkyVectorEnv:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Callable[[], Env]]:
        yield lambda: Adventure(ledger, plan)

    return SkyVectorEnv(opened(), count, observation_space=Unicode(), action_space=ToolCallSpace(TOOLS), **options)


class Visits:
    """A plan for each visit, counted over all environments, in the order of their resets."""

    def __init__(self, **plans: Plan) -> None:
        self._plans = {int(name[1:]): plan for name, plan in plans.items()}
        self._visit = 0
        self.held = threading.Event()

    def __call__(self, task_id: str) -> Plan:
        self._visit += 1
        self.held.set()
        return self._plans.get(self._visit, Plan())


@pytest.mark.parametrize(
    ("seed", "wanted"),
    [
        (None, [None, None]),
        (0, [0, 1]),
        (np.int64(3), [3, 4]),
        ([5, None], [5, None]),
        ((1, 2), [1, 2]),
        (np.array([8, 9]), [8, 9]),
    ],
)
def test_seeds_of_every_kind(seed: Any, wanted: list[int | None]) -> None:
    ledger = Ledger()
    envs = vector(ledger)
    envs.reset(seed=seed)
    assert sorted(ledger.seeds, key=str) == sorted(wanted, key=str)
    for wrong in ([], [1], [1, 2, 3]):
        with pytest.raises(ConfigError, match="seeds need 2 items"):
            envs.reset(seed=wrong)
    envs.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_one_that_fails_to_reset_is_named_and_reset_alone(mode: AutoresetMode) -> None:
    ledger = Ledger()
    envs = vector(ledger, 3, Visits(v2=Plan(init_error=SandboxLost("boom"))), autoreset_mode=mode)
    with pytest.raises(SandboxLost, match="boom") as caught:
        envs.reset()
    (note,) = caught.value.__notes__
    failed = int(note.split()[1])
    with pytest.raises(ResetNeeded):
        envs.step([DIG] * 3)
    observations, _ = envs.reset(options={"reset_mask": np.arange(3) == failed})
    assert observations == ("You stand in room 1.",) * 3
    _, rewards, terminated, _, _ = envs.step([END] * 3)
    assert (list(rewards), list(terminated)) == ([0.0] * 3, [True] * 3)
    envs.close()
    assert ledger.closed == ledger.made == 3


def test_one_that_fails_in_a_step_costs_the_others_nothing() -> None:
    envs = vector(Ledger(), 2, Visits(v2=Plan(step_error=SandboxLost("it died"))))
    envs.reset()
    with pytest.raises(SandboxLost, match="it died") as caught:
        envs.step([go(3), go(3)])
    failed = int(caught.value.__notes__[0].split()[1])
    observations, _ = envs.reset(options={"reset_mask": np.arange(2) == failed})
    assert observations[1 - failed] == "You stand in room 3."
    envs.step([DIG, DIG])
    _, rewards, *_ = envs.step([END, END])
    assert list(rewards) == [float(i != failed) for i in range(2)]
    envs.close()


@pytest.mark.parametrize("call", ["reset", "step", "evaluate"])
def test_one_that_hangs_is_freed_at_the_deadline(call: str) -> None:
    hanging = {"reset": Plan(init=FOREVER), "step": Plan(step=FOREVER), "evaluate": Plan(evaluate=FOREVER)}[call]
    ledger = Ledger()
    envs = vector(ledger, 2, Visits(v1=hanging), timeout=3.0)
    if call != "reset":
        envs.reset()
    with pytest.raises(DeadlineExceeded, match=r"within 3 s"):
        _ = envs.reset() if call == "reset" else envs.step([END, END])
    with pytest.raises(ResetNeeded):
        envs.step([END, END])
    assert envs.reset()[0] == ("You stand in room 1.",) * 2
    envs.step([go(3), go(3)])
    envs.close()
    assert ledger.made == 2


def test_an_interrupted_step_needs_a_reset_and_no_more() -> None:
    async def main() -> None:
        envs = vector(Ledger(), 2, Visits(v1=Plan(step=FOREVER)))
        await envs.areset()
        with anyio.move_on_after(0.1) as scope:
            await envs.astep([END, END])
        assert scope.cancelled_caught
        with pytest.raises(ResetNeeded):
            await envs.astep([END, END])
        await envs.areset()
        _, _, terminated, _, _ = await envs.astep([END, END])
        assert list(terminated) == [True, True]
        await envs.aclose()

    anyio.run(main)


@pytest.mark.parametrize("busy", ["reset", "step"])
def test_closing_in_the_middle_of_a_call_ends_it(busy: str) -> None:
    ledger, said = Ledger(), list[str]()
    hanging = Visits(v1=Plan(init=FOREVER)) if busy == "reset" else Visits(v3=Plan(init=FOREVER))
    envs = vector(ledger, 2, hanging)
    if busy == "step":  # which begins the next episode of one that has ended
        envs.reset()
        envs.step([END, go(3)])
    hanging.held.clear()

    def call() -> None:
        try:
            if busy == "reset":
                envs.reset()
            else:
                envs.step([END, END])
        except ResetNeeded as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    hanging.held.wait()
    envs.close()
    thread.join()
    assert said in (["interrupted"], ["the vector environment is closed"])  # as close came in its middle or before
    assert ledger.closed == 2
    assert ledger.live == (busy == "step")  # the ledger counts the episode that a reset replaced
    for late in (envs.reset, lambda: envs.step([END, END])):
        with pytest.raises(ResetNeeded, match="closed"):
            late()
    envs.close()


def test_closing_that_fails_is_told_and_hinders_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    envs = vector(ledger, 3, Visits(v2=Plan(close_error=OSError("no"))))
    envs.reset()
    envs.close()
    assert ledger.closed == 2
    assert "not closed: env.aclose: OSError: no" in caplog.text


def test_what_cannot_be_opened_leaves_no_thread() -> None:
    before = threading.active_count()

    def broken() -> Env:
        raise ValueError("factory")

    @asynccontextmanager
    async def no_factory() -> AsyncIterator[Callable[[], Env]]:
        yield broken

    @asynccontextmanager
    async def no_connection() -> AsyncIterator[Callable[[], Env]]:
        raise OSError("connect")
        yield broken

    for opened, error in ((no_factory, ValueError), (no_connection, OSError)):
        with pytest.raises(error):
            SkyVectorEnv(opened(), 2, observation_space=Unicode(), action_space=ToolCallSpace(TOOLS))
    with pytest.raises(ConfigError, match="timeout"):
        vector(Ledger(), timeout=0.0)
    assert threading.active_count() == before
