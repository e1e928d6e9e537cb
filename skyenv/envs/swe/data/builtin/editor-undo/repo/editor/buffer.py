"""Text with a cursor."""


class Buffer:
    """A text and a cursor, which is a position from 0 to the length of the text."""

    def __init__(self, text=""):
        self.text = text
        self.cursor = len(text)

    def move(self, position):
        """Put the cursor at position, or at the nearest one that there is."""
        self.cursor = max(0, min(position, len(self.text)))

    def type(self, letters):
        """Insert letters at the cursor, which ends up behind them."""
        self.text = self.text[: self.cursor] + letters + self.text[self.cursor :]
        self.cursor += len(letters)

    def backspace(self, count=1):
        """Delete up to count letters before the cursor."""
        start = max(0, self.cursor - count)
        self.text = self.text[:start] + self.text[self.cursor :]
        self.cursor = start

    def replace_all(self, old, new):
        """Replace all occurrences of old; return how many there were. The cursor goes to the end."""
        count = self.text.count(old) if old else 0
        if count:
            self.text = self.text.replace(old, new)
            self.cursor = len(self.text)
        return count
