"""Text that is known to be safe."""


class Markup(str):
    """Text that needs no more escaping."""


def escape(value):
    """Return value as Markup, with the characters that mean something in HTML replaced."""
    text = str(value)
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(char, entity)
    return Markup(text)
