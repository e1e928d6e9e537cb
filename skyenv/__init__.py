"""skyenv: tool environments, isolated sandboxes and exact-token rollouts for training language models.

Importing it registers the `SkyRL/*` environments with Gymnasium and loads nothing heavy: the public names below are
imported on first use, and torch, transformers, trl and docker never.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skyenv.registry import announce, make

if TYPE_CHECKING:
    from skyenv import formats, testing
    from skyenv.core import Engine, Env, Sandbox, SandboxProvider, Tool
    from skyenv.errors import ConfigError, SkyEnvError
    from skyenv.remote.client import connect
    from skyenv.renderer import Renderer
    from skyenv.types import (
        Completion,
        ExecResult,
        Limits,
        SamplingParams,
        Step,
        StopReason,
        ToolCall,
        ToolSpec,
        Trajectory,
        TrajectoryGroup,
    )
    from skyenv.vector.pipeline import RolloutPipeline

_HOME = {
    "Completion": "skyenv.types",
    "ConfigError": "skyenv.errors",
    "Engine": "skyenv.core",
    "Env": "skyenv.core",
    "ExecResult": "skyenv.types",
    "Limits": "skyenv.types",
    "Renderer": "skyenv.renderer",
    "RolloutPipeline": "skyenv.vector.pipeline",
    "SamplingParams": "skyenv.types",
    "Sandbox": "skyenv.core",
    "SandboxProvider": "skyenv.core",
    "SkyEnvError": "skyenv.errors",
    "Step": "skyenv.types",
    "StopReason": "skyenv.types",
    "Tool": "skyenv.core",
    "ToolCall": "skyenv.types",
    "ToolSpec": "skyenv.types",
    "Trajectory": "skyenv.types",
    "TrajectoryGroup": "skyenv.types",
    "connect": "skyenv.remote.client",
}
_MODULES = ("formats", "testing")

__all__ = [
    "Completion",
    "ConfigError",
    "Engine",
    "Env",
    "ExecResult",
    "Limits",
    "Renderer",
    "RolloutPipeline",
    "SamplingParams",
    "Sandbox",
    "SandboxProvider",
    "SkyEnvError",
    "Step",
    "StopReason",
    "Tool",
    "ToolCall",
    "ToolSpec",
    "Trajectory",
    "TrajectoryGroup",
    "connect",
    "formats",
    "make",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"skyenv.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'skyenv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


announce()
