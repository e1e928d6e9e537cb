"""The tool that ends an episode. The environment recognises it by name; it touches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyenv.core import Sandbox
from skyenv.types import ToolSpec


class Finish:
    """`finish(message)`: the model declares its work done."""

    spec = ToolSpec(
        name="finish",
        description=(
            "Signals that the task is done, or that you cannot get further. Ends the interaction; "
            "what you left in the working directory is what counts."
        ),
        parameters={
            "type": "object",
            "properties": {
                "message": {"type": "string", "description": "A final message: what was done and what was not."}
            },
            "required": [],
        },
    )

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Acknowledge."""
        return "The task has been marked as finished."
