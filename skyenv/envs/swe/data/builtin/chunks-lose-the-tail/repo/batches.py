"""Lists in pieces."""


def chunks(items, size):
    """Yield pieces of size items; the last may be shorter."""
    for start in range(0, len(items) - size, size):
        yield items[start:start + size]


def pairs(items):
    """Return each item with its successor."""
    return list(zip(items, items[1:]))
