"""The flat numbers of a run for Prometheus: the same names, with stage, error kind and K as labels.

`stage/init/wait_p95` is `skyenv_stage_wait_p95{stage="init"}`, `failures/SandboxLost` is
`skyenv_failures{kind="SandboxLost"}`, `pass@4` is `skyenv_pass_at{k="4"}`, `engine/idle` is `skyenv_engine_idle`.
All are gauges; the numbers are asked for when somebody reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skyenv.errors import ConfigError

LABELLED = (
    (re.compile(r"stage/(?P<label>[^/]+)/(?P<rest>.+)"), "stage/{rest}", "stage"),
    (re.compile(r"(?P<rest>failures|retries)/(?P<label>.+)"), "{rest}", "kind"),
    (re.compile(r"(?P<rest>pass)@(?P<label>\d+)"), "{rest}_at", "k"),
)


def series_of(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The Prometheus name and labels of a number."""
    labels: tuple[tuple[str, str], ...] = ()
    for pattern, form, label in LABELLED:
        if found := pattern.fullmatch(name):
            name, labels = form.format(rest=found["rest"]), ((label, found["label"]),)
            break
    return "skyenv_" + re.sub(r"[^a-zA-Z0-9_]", "_", name), labels


class NumbersCollector(Collector):
    """Gauges that are looked up when read; `read` is called in the reader's thread."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Names only, so that registering asks nobody."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        families: dict[tuple[str, tuple[str, ...]], GaugeMetricFamily] = {}
        for name, value in self._read().items():
            series, labels = series_of(name)
            keys = tuple(key for key, _value in labels)
            if (series, keys) not in families:
                families[series, keys] = GaugeMetricFamily(series, "See skyenv.vector.metrics.", labels=keys)
            families[series, keys].add_metric([text for _key, text in labels], value)
        yield from families.values()


@contextmanager
def served(read: Callable[[], Mapping[str, float]], port: int, host: str = "127.0.0.1") -> Iterator[int]:
    """Serve `/metrics` until the block ends; yields the port, a free one for 0. ConfigError when it is taken."""
    registry = CollectorRegistry()
    registry.register(NumbersCollector(read))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"metrics.prometheus_port: cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
