"""A verifier script that leaves a reward in a file, as Harbor and terminal-bench tasks have it.

It runs on the machine that the agent worked on, because what such tasks ask for may lie anywhere on it, unless the
task says otherwise. Whatever the agent left where the reward or the tests go is removed first, and nothing of the
agent's runs any more; programs that the agent replaced are not: such a reward is worth as much as the task's author
made it.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping

from skyenv.core import Sandbox
from skyenv.envs.swe.runners import Job, Report, merge
from skyenv.envs.swe.runners.logs import parse_log
from skyenv.errors import SandboxPathError
from skyenv.types import ExecResult

TESTS, LOGS = "/tests", "/logs/verifier"
AGENT_LOGS, ARTIFACTS = "/logs/agent", "/logs/artifacts"
RUN_TESTS = f"chmod +x {TESTS}/test.sh && {TESTS}/test.sh"
MAX_BYTES = 1 << 20


class HarborRunner:
    """Runs `test_command` with the tests in `/tests`; with a `parser` the log decides, else the reward file."""

    modules: frozenset[str] = frozenset()
    max_output_bytes = 16 << 20

    def private_files(self, job: Job) -> Mapping[str, bytes]:
        """Nothing: the tests go where tasks of this kind look for them."""
        return {}

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Nothing."""
        return {}

    def command(self, job: Job) -> str:
        """Run the verifier from the working directory."""
        place = shlex.quote(job.repo_path)
        return f"mkdir -p {LOGS} && cd {place} && export TEST_DIR={TESTS} && {job.test_command or RUN_TESTS}"

    async def report(self, job: Job, box: Sandbox, result: ExecResult) -> Report:
        """The reward, 1 or 0 when a log decides: all tests of it have to pass or be skipped."""
        if job.parser:
            outcomes = merge(parse_log(job.parser, result.output))
            good = all(outcome in ("passed", "skipped", "xfailed") for outcome in outcomes.values())
            return Report(outcomes, bool(outcomes), result.exit_code, reward=float(good) if outcomes else None)
        await box.kill_processes()
        reward = await _read_reward(box)
        return Report({}, reward is not None, result.exit_code, reward=reward)


async def _read_reward(box: Sandbox) -> float | None:
    for name, read in (("reward.json", _from_json), ("reward.txt", _number)):
        try:
            data = await box.read_file(f"{LOGS}/{name}", max_bytes=MAX_BYTES)
        except SandboxPathError:
            continue
        return read(data)
    return None


def _number(data: bytes) -> float | None:
    try:
        value = float(data.decode("ascii"))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _from_json(data: bytes) -> float | None:
    """A number, the field `reward`, or the mean of several named rewards."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, Mapping):
        value = value.get("reward", list(value.values()))
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        return None
    mean = sum(numbers) / len(numbers)
    return float(mean) if math.isfinite(mean) else None
