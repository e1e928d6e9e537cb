"""Prices in cents."""


def to_cents(amount):
    """Return a price such as 19.99 in whole cents."""
    return int(amount * 100)


def show(cents):
    """Return cents as text with two decimals."""
    return "%d.%02d" % divmod(cents, 100)


def total(amounts):
    """Return the sum of prices in cents."""
    return sum(to_cents(amount) for amount in amounts)
