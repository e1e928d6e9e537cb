"""The tool that writes a thought down and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyenv.core import Sandbox
from skyenv.types import ToolSpec


class Think:
    """`think(thought)`: room for reasoning in models that reason only inside calls. Keeps nothing."""

    spec = ToolSpec(
        "think",
        "Think about something: weigh options, plan, find the cause of an error. Obtains no new information and "
        "changes nothing; the thought is only logged.",
        {
            "type": "object",
            "properties": {"thought": {"type": "string", "description": "The thought to log."}},
            "required": ["thought"],
        },
    )

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Acknowledge."""
        return "Your thought has been logged."
