"""The Gregorian calendar."""


def is_leap(year):
    """Return whether year has a 29th of February."""
    return year % 4 == 0 and year % 100 != 0


def days_in_year(year):
    """Return how many days year has."""
    return 366 if is_leap(year) else 365


def century(year):
    """Return the century that year belongs to."""
    return (year + 99) // 100
