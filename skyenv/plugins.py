"""Parts of a user's own, named in a configuration by where they are: `package.module:Name`."""

from __future__ import annotations

import importlib
from typing import Any

from skyenv.errors import ConfigError, boundary


def load(field: str, path: str) -> Any:
    """The object at `package.module:Name`; a class is called without arguments.

    Raises ConfigError naming `field`. Importing runs that module: configurations are trusted input.
    """
    module_name, _, name = path.partition(":")
    with boundary(ConfigError, f"{field}: cannot import {module_name!r}"):
        found = vars(importlib.import_module(module_name)).get(name)
    if found is None:
        raise ConfigError(f"{field}: {module_name!r} has no {name!r}")
    with boundary(ConfigError, f"{field}: {path}"):
        return found() if isinstance(found, type) else found
