"""What an evaluation came to, in numbers: resolved rate with its interval, pass@k, statuses, costs.

The 95 % interval counts tasks, not samples: samples of one task are not independent. With one sample a task it is
Wilson's; with several, the normal interval of the tasks' means (Miller 2024, "Adding Error Bars to Evals").
pass@k is the unbiased estimate of Chen et al. 2021, 1 - C(n - c, k) / C(n, k), averaged over tasks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from skyenv.types import Trajectory
from skyenv.vector.metrics import one_of, pass_sizes

Z = 1.959964
STAGES = ("init", "run", "eval")


def scores(trajectories: Sequence[Trajectory], samples: int) -> dict[str, Any]:
    """Counts and rates over all samples; a sample that infrastructure spoiled counts as not resolved."""
    solved = solved_by_task(trajectories)
    resolved = sum(count for count, _of in solved.values())
    statuses = Counter(t.failure.kind if t.failure else str(t.verdict.get("status", "unknown")) for t in trajectories)
    stops = Counter(str(t.stop_reason) for t in trajectories if t.stop_reason is not None)
    result: dict[str, Any] = {
        "tasks": len(solved),
        "samples": samples,
        "resolved": resolved,
        "resolved_rate": resolved / len(trajectories) if trajectories else 0.0,
        "interval": list(interval(solved)),
        "statuses": dict(sorted(statuses.items())),
        "stop_reasons": dict(sorted(stops.items())),
        "turns": _spread([len(t.turns) for t in trajectories]),
        "sampled_tokens": _spread([t.sampled_tokens for t in trajectories]),
        "seconds": {stage: _spread([t.seconds.get(stage, 0.0) for t in trajectories]) for stage in STAGES},
    }
    for k in pass_sizes(samples) if samples > 1 else ():  # one sample's pass@1 is the resolved rate
        result[f"pass@{k}"] = pass_at(solved, k)
    return result


def solved_by_task(trajectories: Sequence[Trajectory]) -> dict[str, tuple[int, int]]:
    """Task id to (resolved samples, samples)."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for trajectory in trajectories:
        counts[trajectory.task_id][0] += bool(trajectory.verdict.get("resolved"))
        counts[trajectory.task_id][1] += 1
    return {task_id: (solved, of) for task_id, (solved, of) in counts.items()}


def interval(solved: Mapping[str, tuple[int, int]]) -> tuple[float, float]:
    """The 95 % interval of the resolved rate; (0, 1) when it says nothing."""
    rates = [count / of for count, of in solved.values() if of]
    if not rates:
        return 0.0, 1.0
    n, mean = len(rates), fmean(rates)
    if all(of == 1 for _count, of in solved.values()):
        centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    elif n == 1:
        return 0.0, 1.0
    else:
        centre, half = mean, Z * stdev(rates) / math.sqrt(n)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at(solved: Mapping[str, tuple[int, int]], k: int) -> float:
    """Chance that at least one of `k` samples resolves a task; tasks with fewer samples are left out."""
    chances = [one_of(of, count, k) for count, of in solved.values() if of >= k]
    return fmean(chances) if chances else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "p50": 0.0, "max": 0.0}
    return {"mean": round(fmean(values), 4), "p50": round(median(values), 4), "max": round(max(values), 4)}
