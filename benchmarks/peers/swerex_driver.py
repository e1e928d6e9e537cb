"""SWE-ReX's local deployment behind a pipe: one JSON request a line in, the exit status a line out.

Requests: `start` (a fresh deployment and session in `folder`), `exec` (`command`), `stop`. Runs in a virtual
environment that has SWE-ReX, until standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import sys

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

STARTUP_TIMEOUT = 30.0  # its default of 1 s is not enough on a busy machine


async def run(deployment: LocalDeployment, command: str) -> int:
    """One command in the session; its exit status, 0 when SWE-ReX did not get to know it.

    It asks for the status by a second command with a limit of its own, which a busy machine exceeds.
    """
    action = BashAction(command=command, timeout=60, check="silent")
    return (await deployment.runtime.run_in_session(action)).exit_code or 0


async def main() -> None:
    """Serve until standard input ends."""
    logging.disable(logging.CRITICAL)
    deployment = LocalDeployment()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        status = 0
        if request["op"] == "start":
            await deployment.start()
            wanted = CreateBashSessionRequest(startup_timeout=STARTUP_TIMEOUT)
            await deployment.runtime.create_session(wanted)
            status = await run(deployment, f"cd {shlex.quote(request['folder'])}")
        elif request["op"] == "exec":
            status = await run(deployment, request["command"])
        else:
            await deployment.stop()
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
