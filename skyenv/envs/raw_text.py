"""A wrapper for policies that answer in text: reads tool calls in a format, passes them on one by one."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium

from skyenv import formats
from skyenv.core import Env
from skyenv.errors import ConfigError
from skyenv.spaces import Unicode

NO_CALL = "No tool call found. Answer with one tool call, or call finish when you are done."


class RawText(gymnasium.Wrapper[str, Any, str, Any]):
    """Makes the action raw model text in the tool-call format called `format`.

    Several calls in one text run in order until one ends the episode; their observations are joined. Text without a
    call, or with a broken one, is a turn whose observation says so.
    """

    def __init__(self, env: gymnasium.Env[str, Any], format: str = "codeact") -> None:
        super().__init__(env)
        if not isinstance(env.unwrapped, Env):
            raise ConfigError(f"RawText wraps environments with tools, not {type(env.unwrapped).__name__}")
        self._inner: Env = env.unwrapped
        self._format = formats.get(format)
        self.action_space = Unicode()

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Read and run the calls in `action`."""
        parsed = self._format.parse(action, self._inner.tools, finish_reason="stop", thinking_open=False)
        if not parsed.calls:
            return self.env.step({"error": parsed.error or NO_CALL})
        observations: list[str] = []
        total = 0.0
        for call in parsed.calls:
            observation, reward, terminated, truncated, info = self.env.step(
                {"name": call.name, "arguments": dict(call.arguments)}
            )
            observations.append(observation)
            total += float(reward)
            if terminated or truncated:
                break
        return "\n".join(observations), total, terminated, truncated, info
