"""How a sandbox without a freezer is stopped: everything, or it is told."""

import json
import subprocess
import sys

STOPPING = """
import json, subprocess, sys
from skyenv.remote.inside import processes

busy = subprocess.Popen(["sh", "-c", "while :; do /bin/true; done"])
spared = subprocess.Popen(["sleep", "600"])
try:
    told, stopped = processes.stop_all({spared.pid}, float(sys.argv[1]))
    states = processes.scan()
    print(json.dumps([stopped, busy.pid in told, spared.pid in told, states[busy.pid].state in "TD"]))
finally:
    processes.kill_all()
"""


def stop_within(seconds: float) -> list[object]:
    """Whether all stopped, whether the busy and the spared process were told to, and whether the busy one stands."""
    answer = subprocess.run(
        [sys.executable, "-c", STOPPING, str(seconds)], capture_output=True, check=True, timeout=100
    )
    return list(json.loads(answer.stdout))


def test_everything_stops_but_what_is_spared() -> None:
    assert stop_within(60.0) == [True, True, False, True]


def test_what_has_not_stopped_in_time_is_told() -> None:
    assert stop_within(-1.0)[:2] == [False, False]
