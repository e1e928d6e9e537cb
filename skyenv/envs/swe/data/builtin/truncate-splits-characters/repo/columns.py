"""Texts that must fit into columns of a database."""

ELLIPSIS = "..."


def size(text):
    """Return how many bytes text takes in UTF-8."""
    return len(text.encode("utf-8"))


def shorten(text, limit):
    """Return text cut down to at most limit bytes of UTF-8.

    What was cut is marked with an ellipsis where limit leaves room for one and at least one byte of text, that is
    from a limit of four bytes on.
    """
    if len(text) <= limit:
        return text
    mark = ELLIPSIS if limit > len(ELLIPSIS) else ""
    data = text.encode("utf-8")[: limit - len(mark)]
    return data.decode("utf-8") + mark


def fits(text, limit):
    """Return whether text fits as it is."""
    return size(text) <= limit
