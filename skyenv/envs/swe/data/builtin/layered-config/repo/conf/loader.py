"""Reading of layers."""

import json

from conf.merge import merge


def parse(text):
    """Return the settings in a JSON text; an empty text has none."""
    settings = json.loads(text) if text.strip() else {}
    if not isinstance(settings, dict):
        raise ValueError("settings must be an object")
    return settings


def load(defaults, *texts):
    """Return defaults with the settings of texts laid over them, the last one on top."""
    settings = dict(defaults)
    for text in texts:
        settings = merge(settings, parse(text))
    return settings
