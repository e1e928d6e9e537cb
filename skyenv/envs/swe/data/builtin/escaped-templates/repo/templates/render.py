"""Rendering: {{ name | filter | filter }} in text."""

import re

from templates.filters import FILTERS
from templates.markup import escape

FIELD = re.compile(r"{{(.*?)}}", re.DOTALL)


def render(template, values):
    """Return template with its fields replaced by values, filtered from left to right and escaped at the end.

    Unknown names are empty. Raises KeyError for an unknown filter.
    """

    def replace(match):
        name, *filters = [part.strip() for part in match.group(1).split("|")]
        value = escape(values.get(name, ""))
        for filter_name in filters:
            value = FILTERS[filter_name](value)
        return escape(value)

    return FIELD.sub(replace, template)
