"""Settings for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast examples are made says how busy the machine is, not whether the code is right.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
