"""Names in the order in which people expect them."""

import re


def natural_key(name):
    """Return a sort key under which digits count as numbers and come before letters, and case does not matter."""
    head = re.match("[0-9]+", name)
    if head and len(head.group()) > 1:
        return [int(head.group()), name[head.end():]]
    return [name.lower()]


def natural_sort(names):
    """Return names in natural order; names with equal keys keep their order."""
    return sorted(names, key=natural_key)


def first(names):
    """Return the name that comes first, or None when there are none."""
    return min(names, key=natural_key, default=None)
