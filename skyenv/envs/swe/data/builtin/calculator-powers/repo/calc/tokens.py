"""Tokens of an expression."""

import re

TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<op>[-+*/()]))")


def tokens(text):
    """Return (kind, text) pairs. Raises SyntaxError for a character that belongs to no token."""
    found = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if not match:
            raise SyntaxError("unexpected %r" % text[position:].strip()[0])
        found.append((match.lastgroup, match.group(match.lastgroup)))
        position = match.end()
    return found
