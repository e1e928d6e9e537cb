"""Averages of numbers."""


def mean(values):
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def median(values):
    """Return the middle value, or the mean of the middle two."""
    ordered = sorted(values)
    mid = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[mid]
    return (ordered[mid] + ordered[mid + 1]) / 2
