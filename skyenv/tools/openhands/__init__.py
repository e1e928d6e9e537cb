"""The preset `openhands`: tools that speak as OpenHands 0.25 does, for checkpoints that were trained on its texts.

What the model sees is reproduced: schemas, messages, the numbered empty line after a final line break, snippet
windows, cuts. What happens to files is not: bytes outside an edit, newline style, encoding, mode and links are kept
as the default tools keep them. Descriptions are our own.
"""

from __future__ import annotations

from skyenv.tools.openhands.bash import OpenHandsBash
from skyenv.tools.openhands.editor import OpenHandsEditor
from skyenv.tools.openhands.finish import OpenHandsFinish

__all__ = ["OpenHandsBash", "OpenHandsEditor", "OpenHandsFinish"]
