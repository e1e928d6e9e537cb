"""Which release this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The version of the installed package; sources that run without being installed have none."""
    try:
        return importlib.metadata.version("skyenv")
    except importlib.metadata.PackageNotFoundError:
        return "unknown: run from sources"
