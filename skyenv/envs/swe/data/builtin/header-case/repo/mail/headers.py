"""Headers of a message."""


class Headers:
    """Names and values in the order of the message; the first value of a name is the one that counts."""

    def __init__(self, pairs=()):
        self._values = {}
        for name, value in pairs:
            self.add(name, value)

    def add(self, name, value):
        """Add a line, also when there is one with this name."""
        self._values[name] = value.strip()

    def get(self, name, default=None):
        """Return the first value of name."""
        return self._values.get(name, default)

    def get_all(self, name):
        """Return all values of name."""
        return [value for key, value in self._values.items() if key == name]

    def __contains__(self, name):
        return name in self._values

    def __iter__(self):
        return iter(self._values.items())

    def __len__(self):
        return len(self._values)
