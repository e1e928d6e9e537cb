"""Bills split among people, in whole cents."""


def split(total, people):
    """Return the share of each of people in a bill of total cents."""
    return split_by_weight(total, [1] * people)


def split_by_weight(total, weights):
    """Return shares of total in proportion to weights (whole numbers, not all zero).

    People of weight zero pay nothing.
    """
    whole = sum(weights)
    return [int(total * weight / whole) for weight in weights]


def show(cents):
    """Return cents as text."""
    sign = "-" if cents < 0 else ""
    return "%s%d.%02d" % (sign, abs(cents) // 100, abs(cents) % 100)
