"""Tool-call wire formats: how tools are described, how calls are read from a model's text, how results travel back.

Every format is pure and fails closed: text that cannot be read as whole, well-formed calls of known tools with valid
arguments yields an error for the model and no call at all. Parsing never raises, takes linear time, and its error
texts depend on nothing but the input. A format of one's own is any object that satisfies `Format`.
"""

from __future__ import annotations

import difflib

from skyenv.errors import ConfigError
from skyenv.formats.codeact import CodeAct
from skyenv.formats.contract import Format, NativeFormat, Parsed
from skyenv.formats.deepseek import DeepSeek
from skyenv.formats.harmony import Harmony
from skyenv.formats.hermes import Hermes
from skyenv.formats.llama3_json import Llama3Json
from skyenv.formats.mistral import Mistral
from skyenv.formats.openai import OpenAITools
from skyenv.formats.qwen3_coder import Qwen3Coder
from skyenv.plugins import load

__all__ = ["CodeAct", "Format", "Hermes", "NativeFormat", "Parsed", "get", "names"]

_FORMATS: tuple[Format, ...] = (
    CodeAct(),
    Hermes(),
    Qwen3Coder(),
    Llama3Json(),
    Mistral(),
    Mistral(named=True),
    DeepSeek(),
    DeepSeek(fenced=False),
    Harmony(),
    OpenAITools(),
)


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(known.name for known in _FORMATS)


def get(name: str | Format) -> Format:
    """The format called `name`, the one at `package.module:Name`, or `name` itself when it is a format.

    A class is called without arguments. Raises ConfigError, naming the nearest for an unknown name; importing a path
    runs that module.
    """
    for known in _FORMATS:
        if known.name == name:
            return known
    found = load("format", name) if isinstance(name, str) and ":" in name else name
    if not isinstance(found, str):
        if not isinstance(found, Format):
            raise ConfigError(f"format: {found!r} lacks a method of skyenv.formats.Format")
        return found
    near = difflib.get_close_matches(found, names(), n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'? " if near else ""
    known_names = ", ".join(sorted(names()))
    raise ConfigError(
        f"format: unknown tool-call format {name!r}; {hint}Known: {known_names}; or package.module:Name of your own."
    )
