"""The `metrics:` section: what is told of a run's pipeline, beside what every run records."""

from __future__ import annotations

from dataclasses import dataclass

from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """`prometheus_port`: serve the numbers there, on loopback (0: a free port); `timeline`: keep timeline.jsonl;
    `engine_slots`: requests that the engines serve at once, where it is known, for `engine/idle`.
    """

    prometheus_port: int | None = None
    timeline: bool = True
    engine_slots: int | None = None

    def __post_init__(self) -> None:
        if self.prometheus_port is not None and not 0 <= self.prometheus_port < 1 << 16:
            raise ConfigError(f"metrics.prometheus_port is {self.prometheus_port}; a port is from 0 to 65535")
        if self.engine_slots is not None and self.engine_slots < 1:
            raise ConfigError(f"metrics.engine_slots is {self.engine_slots}; it must be at least 1")
