"""A script that runs the tests and a program that reads its output, as SWE-bench Pro has them for each instance.

The program runs after everything that the tests started was killed, and comes into the sandbox only then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from skyenv.core import Sandbox
from skyenv.envs.swe.runners import Job, Report, merge
from skyenv.envs.swe.trees import TreeFile, tree_to_tar
from skyenv.errors import SandboxPathError
from skyenv.types import ExecResult

RUN, PARSER = "run_script.sh", "parser.py"
MAX_BYTES = 16 << 20
_WORDS = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped"}


class ScriptRunner:
    """Runs `script[RUN]` with `test_command` as its arguments, then `script[PARSER]` on what it printed."""

    modules: frozenset[str] = frozenset({"pytest", "_pytest"})
    max_output_bytes = 64 << 10

    def private_files(self, job: Job) -> Mapping[str, bytes]:
        """Return the script."""
        return {RUN: job.script[RUN]}

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Nothing."""
        return {}

    def command(self, job: Job) -> str:
        """Run the script, its two streams apart."""
        return f"bash {job.private}/{RUN} {job.test_command} >{job.private}/stdout 2>{job.private}/stderr"

    async def report(self, job: Job, box: Sandbox, result: ExecResult) -> Report:
        """What the program makes of the output."""
        await box.kill_processes()
        place = f"{job.private}.reader"
        await box.upload(place, tree_to_tar({PARSER: TreeFile(job.script[PARSER])}))
        streams = f"{job.private}/stdout {job.private}/stderr"
        await box.exec(f"cd / && python3 -B {place}/{PARSER} {streams} {place}/output.json", timeout=120.0)
        try:
            data = await box.read_file(f"{place}/output.json", max_bytes=MAX_BYTES)
        except SandboxPathError:
            data = b""
        outcomes = merge(_outcomes(data))
        return Report(outcomes, bool(outcomes), result.exit_code)


def _outcomes(data: bytes) -> list[tuple[str, str]]:
    try:
        tests = json.loads(data)["tests"]
        found = [(test["name"], _WORDS.get(test["status"], "error")) for test in tests]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [(name, outcome) for name, outcome in found if isinstance(name, str)]
