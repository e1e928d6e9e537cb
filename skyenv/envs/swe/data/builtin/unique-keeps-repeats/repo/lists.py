"""Small tools for lists."""


def unique(items):
    """Return items without repeats, in the order of their first occurrence."""
    seen = set()
    result = []
    for item in items:
        if item in seen:
            result.append(item)
        seen.add(item)
    return result


def last(items, default=None):
    """Return the last item, or default when there is none."""
    return items[-1] if items else default
