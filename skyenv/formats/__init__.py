"""Tool-call wire formats: how tools are described, how calls are read from a model's text, how results travel back.

Every format is pure and fails closed: text that cannot be read as whole, well-formed calls of known tools with valid
arguments yields an error for the model and no call at all. Parsing never raises, takes linear time, and its error
texts depend on nothing but the input.
"""

from __future__ import annotations

import difflib

from skyenv.errors import ConfigError
from skyenv.formats.codeact import CodeAct
from skyenv.formats.contract import Format, Parsed
from skyenv.formats.hermes import Hermes

__all__ = ["CodeAct", "Format", "Hermes", "Parsed", "get", "names"]

_FORMATS: tuple[Format, ...] = (CodeAct(), Hermes())


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(known.name for known in _FORMATS)


def get(name: str) -> Format:
    """Return the format called `name`. Raises ConfigError naming the nearest for an unknown name."""
    for known in _FORMATS:
        if known.name == name:
            return known
    near = difflib.get_close_matches(str(name), names(), n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"format: unknown tool-call format {name!r}; {hint}Known: {', '.join(sorted(names()))}.")
