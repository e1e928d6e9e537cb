"""The tool `ipython`, and the script that it starts inside the sandbox."""

from __future__ import annotations

from skyenv.tools.kernel.ipython import IPython

__all__ = ["IPython"]
