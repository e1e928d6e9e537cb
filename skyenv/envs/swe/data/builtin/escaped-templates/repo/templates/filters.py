"""Filters: functions of one value."""

from templates.markup import Markup, escape


def upper(value):
    return escape(value).upper()


def trim(value):
    return escape(value).strip()


def default(value):
    """Return a dash in place of nothing."""
    return value if value not in (None, "") else "-"


def safe(value):
    """Declare value to be safe as it is."""
    return Markup(value)


FILTERS = {"upper": upper, "trim": trim, "default": default, "safe": safe}
