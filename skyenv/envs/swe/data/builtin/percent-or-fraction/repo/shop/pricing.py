"""Prices in cents, and what is taken off them."""


def discounted(cents, fraction):
    """Return the price after a discount given as a fraction from 0 to 1, rounded to whole cents, never below zero."""
    return max(0, round(cents * (1 - fraction)))


def best(*discounts):
    """Return the largest of some discounts, 0 when there are none."""
    return max(discounts, default=0)
