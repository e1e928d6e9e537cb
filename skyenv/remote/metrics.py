"""What one node or gateway counts, for Prometheus. A `Metrics` owns its registry; nothing is counted in the module.

Counting costs microseconds and never fails a request. What lives now (slots, sandboxes by state) is not kept up to
date: the owner hands a `census` that is asked when somebody reads.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skyenv.remote.protocol import WireError

CONTENT_TYPE = CONTENT_TYPE_LATEST
RECENT = 512

Phase = Literal["queue", "pull", "mount", "start", "exec", "fork", "snapshot", "delete", "forward"]
Direction = Literal["in", "out"]
Leak = Literal["process", "mount", "cgroup", "directory", "sandbox", "snapshot"]

_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)


@dataclass(frozen=True, slots=True)
class Census:
    """What there is now. `slots` is how many sandboxes fit in all; None when nothing bounds them."""

    slots: int | None = None
    used: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)


class _CensusCollector(Collector):
    """Gauges that are looked up when read."""

    def __init__(self, census: Callable[[], Census]) -> None:
        self._census = census

    def describe(self) -> list[Metric]:
        """Names only, so that registering asks nobody."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        now = self._census()
        if now.slots is not None:
            slots = GaugeMetricFamily("skyenv_slots", "Places for sandboxes.", labels=["use"])
            slots.add_metric(["used"], now.used)
            slots.add_metric(["free"], max(0, now.slots - now.used))
            yield slots
        for name, text, label, counts in (
            ("skyenv_sandboxes", "Sandboxes by state.", "state", now.states),
            ("skyenv_nodes", "Nodes by state, as the gateway sees them.", "state", now.nodes),
        ):
            if counts:
                gauge = GaugeMetricFamily(name, text, labels=[label])
                for value, count in counts.items():
                    gauge.add_metric([value], count)
                yield gauge
        yield GaugeMetricFamily("skyenv_starts_waiting", "Creations that wait for their turn.", value=now.waiting)


class Metrics:
    """Counters and histograms of one node or gateway. Safe to use from its event loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._phases = Histogram(
            "skyenv_phase_seconds", "How long a phase of a sandbox's life took.", ["phase"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._phase: dict[Phase, Histogram] = {}
        execs = self._counter("skyenv_execs_total", "Finished commands.", "outcome")
        self._execs = {outcome: execs.labels(outcome) for outcome in ("zero", "nonzero", "timeout", "oom")}
        self._ended = self._counter("skyenv_sandboxes_ended_total", "Sandboxes that are gone.", "reason")
        self._refused = self._counter("skyenv_refused_total", "Requests answered 429, 503 or 507.", "status", "reason")
        self._errors = self._counter("skyenv_errors_total", "Requests that failed otherwise.", "code")
        self._retries = self._counter("skyenv_retries_total", "Requests that came again and ran nothing twice.", "what")
        self._leaks = self._counter("skyenv_leaks_total", "What should have been gone and had to be removed.", "what")
        self._bytes = self._counter(
            "skyenv_bytes_total", "Bytes of commands and files, and of output and files.", "direction"
        )
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._counts: Counts[str] = Counts()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def watch(self, census: Callable[[], Census]) -> None:
        """Ask `census` for what there is now whenever the metrics are read. Once for each object."""
        self.registry.register(_CensusCollector(census))

    def phase(self, name: Phase) -> Histogram:
        """The histogram of a phase; call `observe(seconds)`."""
        known = self._phase.get(name)
        if known is None:
            known = self._phase[name] = self._phases.labels(name)
        return known

    @contextmanager
    def timed(self, name: Phase) -> Iterator[None]:
        """Observe how long the block took, unless it fails."""
        start = time.perf_counter()
        yield
        self.phase(name).observe(time.perf_counter() - start)

    def executed(self, meta: Mapping[str, Any], seconds: float, output: int) -> str:
        """A command ended after `seconds` of its own with so many bytes of output; its outcome in one word."""
        self.phase("exec").observe(seconds)
        self._recent.append(seconds)
        self.moved("out", output)
        failed = meta.get("exit_code") != 0
        outcome = "oom" if meta.get("oom") else "timeout" if meta.get("timed_out") else "nonzero" if failed else "zero"
        self._execs[outcome].inc()
        self._counts[outcome] += 1
        return outcome

    def ended(self, reason: str) -> None:
        """A sandbox is gone: "deleted", "lease", "lost", "closing"."""
        self._ended.labels(reason).inc()

    def answered(self, error: WireError) -> None:
        """A request was answered with an error."""
        if error.status in (429, 503, 507):
            self.refused(error.status, error.reason or error.code)
        else:
            self.failed(error.code)

    def refused(self, status: int, reason: str) -> None:
        """A request was answered 429, 503 or 507."""
        self._refused.labels(str(status), reason).inc()
        self._counts["refused"] += 1

    def failed(self, code: str) -> None:
        """A request was answered with another error."""
        self._errors.labels(code).inc()

    def retried(self, what: str) -> None:
        """A request with a known key came again."""
        self._retries.labels(what).inc()

    def leaked(self, what: Leak, count: int = 1) -> None:
        """Something was left behind and had to be removed."""
        if count:
            self._leaks.labels(what).inc(count)

    def moved(self, direction: Direction, size: int) -> None:
        """Bytes of a request or an answer."""
        self._bytes.labels(direction).inc(size)

    def summary(self) -> dict[str, float | None]:
        """The few numbers that people watch: counts since the start, and how long the last commands took, seconds."""
        recent, counts = sorted(self._recent), self._counts
        return {
            "execs": sum(counts[outcome] for outcome in self._execs),
            "exec_p50": recent[len(recent) // 2] if recent else None,
            "exec_p95": recent[int(len(recent) * 0.95)] if recent else None,
            "oom": counts["oom"],
            "timeouts": counts["timeout"],
            "refused": counts["refused"],
        }

    def render(self) -> bytes:
        """All of it in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)
