"""Conformance suites of the seams: run one against your own environment, sandbox provider or engine.

Each `check_*` runs small named checks through the public interface only and raises an `ExceptionGroup` of
AssertionErrors that names every check that failed. Suites load when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SUITES = {"check_env": "env", "check_engine": "engine", "check_sandbox": "sandbox"}

__all__ = ["check_engine", "check_env", "check_sandbox"]


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUITES[name]}"), name)
