"""Single fields of a schedule."""

LIMITS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 6))


def parse_field(text, low, high):
    """Return the set of numbers that a field stands for."""
    if text == "*":
        return set(range(low, high + 1))
    if not text.isdigit():
        raise ValueError("bad field %r" % text)
    number = int(text)
    if not low <= number <= high:
        raise ValueError("field %r is not in %d-%d" % (text, low, high))
    return {number}
