"""Nested dicts laid over each other."""


def merge(below, above):
    """Return below with the values of above laid over it; None in above removes a key."""
    for key, value in above.items():
        if value is None:
            below.pop(key, None)
        elif isinstance(value, dict) and isinstance(below.get(key), dict):
            below[key].update(value)
        else:
            below[key] = value
    return below


def lookup(settings, path, default=None):
    """Return the value at a dotted path such as "editor.font.size"."""
    for name in path.split("."):
        if not isinstance(settings, dict) or name not in settings:
            return default
        settings = settings[name]
    return settings
