"""Notes with tags."""


class Note:
    """A text with a list of tags, in the order in which they were added."""

    def __init__(self, text, tags=[]):
        self.text = text
        self.tags = tags

    def add_tag(self, tag):
        """Add tag once; return the note so that calls can be chained."""
        if tag not in self.tags:
            self.tags.append(tag)
        return self

    def copy(self, text):
        """Return a note with another text and the same tags."""
        return Note(text, self.tags)


def by_tag(notes, tag):
    """Return the notes that carry tag."""
    return [note for note in notes if tag in note.tags]
