"""Checked fields of rows: each returns a value of the right kind or raises ConfigError saying where and what to do."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyenv.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a public data set; `where` names file and row, `base` is the folder of the file.

    Names are tried in their order and in both cases, as data sets spell them. An empty value counts as missing.
    """

    fields: Mapping[str, Any]
    where: str
    base: Path

    def has(self, *names: str) -> bool:
        """Whether all fields are there, whatever is in them."""
        return all(name in self.fields for name in names)

    def value(self, *names: str) -> Any:
        """The first of these fields that holds something; None when none does."""
        for name in names:
            for spelling in (name, name.upper(), name.lower()):
                found = self.fields.get(spelling)
                if found is not None and found != "":
                    return found
        return None

    def at(self, name: str) -> str:
        """Where a field is, for a message."""
        label = self.value("instance_id", "docker_image") or ""
        return f"{self.where} ({label}): {name}" if isinstance(label, str) and label else f"{self.where}: {name}"

    def text(self, *names: str, default: str | None = None) -> str:
        """A text. ConfigError when it is missing and has no default, or is no text."""
        found = self.value(*names)
        if found is None and default is not None:
            return default
        if found is None:
            raise ConfigError(f"{self.at(names[0])}: is missing; add it")
        return text(found, self.at(names[0]))

    def patch(self, *names: str) -> bytes:
        """A patch, byte for byte, lone surrogates included."""
        data = self.text(*names).encode("utf-8", "surrogateescape")
        return data if data.endswith(b"\n") else data + b"\n"

    def ids(self, *names: str) -> tuple[str, ...]:
        """Test ids: a list, or one written as JSON or as a Python literal; a repeated id counts once."""
        found = self.value(*names)
        return () if found is None else ids(found, self.at(names[0]), repeated=True)

    def failing(self, *names: str) -> tuple[str, ...]:
        """The tests that the fix must turn. ConfigError when there is none."""
        found = self.ids(*names)
        if not found:
            raise ConfigError(f"{self.at(names[0])}: names no failing test, so nothing could show that work is done")
        return found

    def structure(self, name: str) -> Mapping[str, Any]:
        """A mapping, or one written as JSON text. ConfigError when it is missing or neither."""
        found = self.value(name)
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except ValueError as error:
                raise ConfigError(f"{self.at(name)}: not valid JSON: {error}") from error
        if found is None:
            raise ConfigError(f"{self.at(name)}: is missing; add it")
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self.at(name)}: must be a mapping, not {type(found).__name__}")
        return found


def mapping(value: object, where: str, known: Sequence[str], required: Sequence[str] = ()) -> Mapping[str, Any]:
    """A mapping whose keys are among `known`, with all that are required."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be a mapping with the keys {', '.join(known)}")
    for name in value:
        if name not in known:
            raise ConfigError(f"{where}: {name}: unknown field{did_you_mean(str(name), known)}")
    for name in required:
        if name not in value:
            raise ConfigError(f"{where}: {name}: is missing; add it")
    return value


def text(value: object, where: str) -> str:
    """A text with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: must be a text that is not empty")
    return value


def texts(value: object, where: str) -> tuple[str, ...]:
    """A list of texts with something in them."""
    if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
        raise ConfigError(f"{where}: must be a list of texts; quote them")
    return tuple(value)


def matching(value: object, where: str, pattern: str, what: str) -> str:
    """A text that matches as a whole."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ConfigError(f"{where}: {value!r} may only hold {what}")
    return value


def ids(value: object, where: str, *, repeated: bool = False) -> tuple[str, ...]:
    """Test ids: a list, or one written as JSON or as a Python literal, as public data sets have it."""
    if isinstance(value, str):
        value = _literal(value, where)
    found = texts(list(value) if isinstance(value, tuple) else value, where)
    if len(set(found)) != len(found) and not repeated:
        raise ConfigError(f"{where}: names a test twice")
    return tuple(dict.fromkeys(found))


def _literal(value: str, where: str) -> object:
    for read in (json.loads, ast.literal_eval):
        try:
            found: object = read(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found
    raise ConfigError(f"{where}: {value[:60]!r} is not a list of test ids")


def number(value: object, where: str, low: float, high: float) -> float:
    """A number within bounds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{where}: must be a number from {low} to {high}")
    return float(value)


def repo_path(value: object, where: str) -> str:
    """An absolute, normalised path that is not the root."""
    path = text(value, where)
    if not path.startswith("/") or posixpath.normpath(path) != path or path.count("/") == len(path):
        raise ConfigError(f"{where}: {path!r} is not an absolute, normalised path below /")
    return path
