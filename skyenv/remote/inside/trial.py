"""One attempt to set a sandbox up, to learn whether this machine can and what stands in the way.

Prints one JSON object: `error` (null when it worked) and the control groups that this user can create.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from typing import Any, NoReturn

from . import cgroups, children, enter, kernel


def main() -> None:
    """Entry point: standard input is a configuration as the launcher gets it, with the fields of a create request."""
    config = json.load(sys.stdin)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.become_user(config["run_as"])
    config["cgroups"] = cgroups.find()
    try:
        children.prepare_directories(config)
        error = _try_once(config)
    except OSError as failure:
        error = str(failure)
    sys.stdout.write(json.dumps({"error": error, "cgroups": config["cgroups"]}))


def _try_once(config: dict[str, Any]) -> str | None:
    ours, theirs = socket.socketpair()
    if not os.fork():
        _attempt(config, theirs)
    theirs.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    answer = ours.recv(4096).decode(errors="replace")
    group = cgroups.Group.of([cgroups.Hierarchy(*entry) for entry in config["cgroups"]], config["name"])
    deadline = time.monotonic() + 2.0
    while not group.remove() and time.monotonic() < deadline:
        time.sleep(0.005)
    return None if answer == "ok" else answer or "the attempt was killed"


def _attempt(config: dict[str, Any], sock: socket.socket) -> NoReturn:
    def succeed(_counter: int | None) -> NoReturn:
        sock.send(b"ok")
        os._exit(0)

    try:
        report = os.open("/dev/null", os.O_WRONLY)
        try:
            enter.start(config, report, succeed)
        except OSError as failure:
            sock.send(str(failure).encode()[:4096])
    finally:
        os._exit(0)
