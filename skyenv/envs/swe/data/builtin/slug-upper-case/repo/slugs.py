"""Titles as parts of addresses."""

import re


def slugify(title):
    """Return the words of title in lower case, joined by hyphens."""
    words = re.findall("[a-z0-9]+", title)
    return "-".join(words)


def unslug(slug):
    """Return slug as a title again."""
    return slug.replace("-", " ").capitalize()
