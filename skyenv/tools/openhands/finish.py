"""`finish` without parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyenv.core import Sandbox
from skyenv.types import ToolSpec


class OpenHandsFinish:
    """`finish()`: ends the episode; the environment recognises it by name."""

    spec = ToolSpec(
        "finish",
        "Finish the interaction, when the task is complete or you cannot proceed further.",
        {"type": "object", "properties": {}, "required": []},
    )

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Acknowledge."""
        return "The task has been marked as finished."
