"""Numbers kept inside a range."""


def clamp(value, low, high):
    """Return value, or the bound that it lies beyond."""
    return max(low, min(value, low))


def inside(value, low, high):
    """Return True when low <= value <= high."""
    return low <= value <= high
