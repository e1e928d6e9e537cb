"""SWE-ReX's local deployment behind a pipe: a JSON string with a command a line in, its exit status a line out.

Runs in a virtual environment that has SWE-ReX; standard input's end closes the deployment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest


async def main() -> None:
    """Serve until standard input ends."""
    logging.disable(logging.CRITICAL)
    deployment = LocalDeployment()
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        action = BashAction(command=json.loads(line), timeout=60, check="silent")
        result = await deployment.runtime.run_in_session(action)
        sys.stdout.write(f"{result.exit_code}\n")
        sys.stdout.flush()
    await deployment.stop()


if __name__ == "__main__":
    asyncio.run(main())
