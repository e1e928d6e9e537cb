"""Due dates of invoices."""

import calendar
from datetime import date


def month_length(year, month):
    """Return how many days the month has."""
    return calendar.monthrange(year, month)[1]


def add_months(day, count):
    """Return the same day of the month count months later, or the month's last day when it is shorter.

    A negative count goes back.
    """
    month = day.month + count
    year = day.year + month // 12
    return day.replace(year=year, month=month % 12)


def installments(first, count):
    """Return count due dates, one a month, all counted from first."""
    return [add_months(first, i) for i in range(count)]


def is_month_end(day):
    """Return whether day is the last of its month."""
    return day.day == month_length(day.year, day.month)


if __name__ == "__main__":
    for due in installments(date(2024, 1, 15), 3):
        assert due.day == 15
