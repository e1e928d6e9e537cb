"""Settings as data: YAML files and command-line words in, typed values out, every mistake named with its fix.

Knows nothing of what the settings mean: `build` makes any frozen dataclass whose fields are scalars, tuples of text,
mappings, literals, or such dataclasses and tuples of them again.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from skyenv.errors import ConfigError

T = TypeVar("T")


LARGEST = 1_000_000_000
"""Of any whole number here: what is above is a slip, and breaks libraries that count in 32 bits."""


class _OnceLoader(yaml.SafeLoader):
    """YAML in which no key of a mapping stands twice; the second would win, and nobody would see it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.YAMLError(
                    f"{key.value!r} stands twice, in lines {seen[key.value]} and {line}; leave one out"
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file; ConfigError when it cannot be read or is something else."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}; write a mapping such as `steps: 100`")
    return data


def with_overrides(data: Mapping[str, Any], words: Sequence[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """Lay `--key value`, `--section.key value` and `--key=value` words over `data`; values are read as YAML.

    Of the keys in `texts`, what YAML takes for a number, a date or a truth is text as it was written.
    """
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    rest = list(words)
    while rest:
        key, value = _next_override(rest)
        *sections, leaf = key.split(".")
        target = merged
        for section in sections:
            below = target.setdefault(section, {})
            if not isinstance(below, dict):
                raise ConfigError(f"--{key}: {section} is {below!r}, not a section")
            target = below
        try:
            read = yaml.safe_load(value)
            target[leaf] = value if key in texts and read is not None and not isinstance(read, str) else read
        except yaml.YAMLError as error:
            raise ConfigError(f"--{key} {value}: not valid YAML") from error
    return merged


def _next_override(words: list[str]) -> tuple[str, str]:
    word = words.pop(0)
    if not word.startswith("--") or word == "--":
        raise ConfigError(f"unexpected argument {word!r}; overrides are written --key value")
    key, equals, value = word[2:].partition("=")
    if equals:
        return key, value
    if not words:
        raise ConfigError(f"--{key} needs a value")
    return key, words.pop(0)


def check_least(numbers: Mapping[str, tuple[float, float]]) -> None:
    """Numbers by key, each with the least that it may be. Raises ConfigError for the first below."""
    for key, (value, least) in numbers.items():
        if value < least:
            raise ConfigError(f"{key} is {value}; it must be at least {least}")


def build(kind: type[T], data: Mapping[str, Any], prefix: str = "", known: Sequence[str] = ()) -> T:
    """Make `kind` from nested mappings. ConfigError names a wrong value, or the nearest of `known` for a wrong key."""
    known = known or every_key(kind, prefix)
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in data.items():
        if key not in hints:
            raise ConfigError(unknown_key(f"{prefix}{key}", known))
        values[key] = _convert(hints[key], value, f"{prefix}{key}", known)
    return kind(**values)


def text_keys(kind: type[Any], prefix: str = "") -> list[str]:
    """The dotted keys of a dataclass that hold text, sections included."""
    keys = []
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            keys += text_keys(hint, f"{prefix}{name}.")
        elif hint in (str, str | None):
            keys.append(f"{prefix}{name}")
    return keys


def every_key(kind: type[Any], prefix: str = "") -> list[str]:
    """All dotted keys of a dataclass, sections included."""
    keys = []
    for name, hint in typing.get_type_hints(kind).items():
        keys.append(f"{prefix}{name}")
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            keys += every_key(hint, f"{prefix}{name}.")
    return keys


def plain(section: Any) -> dict[str, Any]:
    """A settings dataclass as nested mappings, lists and scalars: what `build` takes and YAML writes."""
    return {key: _plain(value) for key, value in dataclasses.asdict(section).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The message for a key that does not exist, naming the nearest that does."""
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:
        near = [n for n in known if difflib.get_close_matches(leaf, [n.rpartition(".")[2]], cutoff=0.6)][:1]
    near = near or difflib.get_close_matches(leaf, known, n=1, cutoff=0.0)
    return f"unknown key {key!r}; did you mean {near[0]!r}?"


def _convert(hint: Any, value: Any, key: str, known: Sequence[str]) -> Any:
    """`value` as the annotated type, or ConfigError naming the key and what it takes."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} is a section; write its keys below it, not {value!r}")
        return build(hint, value, f"{key}.", known)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _convert(arguments[0], value, key, known)
    if origin is Literal:
        if value is False and "off" in arguments:  # how YAML reads a bare off
            value = "off"
        if value not in arguments:
            raise ConfigError(f"{key} is {value!r}; it must be one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple and dataclasses.is_dataclass(arguments[0]) and isinstance(arguments[0], type):
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise ConfigError(f"{key} is {value!r}; write a list of sections")
        return tuple(build(arguments[0], item, f"{key}[{place}].") for place, item in enumerate(value))
    if origin is tuple:
        words = value.split(",") if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"{key} is {value!r}; write a list of strings")
        return tuple(words)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{key} is {value!r}; write a mapping of keys to values")
        return {
            name: _scalar(str, item, f"{key}.{name}") if arguments[1] is str else item for name, item in value.items()
        }
    return _scalar(hint, value, key)


def _scalar(hint: type[Any], value: Any, key: str) -> Any:
    if hint is float:
        number = as_float(value)
        if number is None or not math.isfinite(number):
            raise ConfigError(f"{key} is {value!r}; write a number such as 0.5")
        return number
    if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{key} is {value!r}; write a whole number such as 8")
    if hint is int and abs(value) > LARGEST:
        raise ConfigError(f"{key} is {value}; it must be at most {LARGEST}")
    if hint is bool and not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; write true or false")
    if hint is str and not isinstance(value, str):
        raise ConfigError(f"{key} is {value!r}; write text, in quotes where it looks like a number")
    return value


def as_float(value: Any) -> float | None:
    """A number, also written like `1e-4`, which YAML takes for text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def foreign_options(
    kind: type[Any], options: Mapping[str, Any], section: str, owned: Mapping[str, str]
) -> dict[str, Any]:
    """Options that pass through to another library's dataclass `kind`, with numbers as numbers.

    `owned` names what is set elsewhere and by which key of ours. ConfigError for a key that is unknown, owned or of
    another type than the library's default.
    """
    fields = {item.name: item for item in dataclasses.fields(kind) if item.init}
    checked = {}
    for key, value in options.items():
        if key in owned:
            raise ConfigError(f"{section}.{key} is set by {owned[key]}")
        if key not in fields:
            known = [f"{section}.{name}" for name in fields if name not in owned]
            raise ConfigError(unknown_key(f"{section}.{key}", known))
        listed = isinstance(value, list) and "list" in str(fields[key].type)
        checked[key] = value if listed else _like(f"{section}.{key}", fields[key].default, value)
    return checked


def _like(key: str, default: Any, value: Any) -> Any:
    """`value` checked against the type of a default, where there is one."""
    number = as_float(value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; write true or false")
    elif isinstance(default, int | float):
        if number is None:
            raise ConfigError(f"{key} is {value!r}; write a number")
        return int(number) if isinstance(default, int) and number.is_integer() else number
    elif isinstance(default, str) and not isinstance(value, str):
        raise ConfigError(f"{key} is {value!r}; write text")
    elif isinstance(value, str) and number is not None:
        return number
    return value
