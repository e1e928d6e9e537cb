"""The bus."""


class Bus:
    """Calls listeners by the name of an event."""

    def __init__(self):
        self._listeners = {}

    def on(self, name, listener):
        """Call listener for each event of that name."""
        self._listeners.setdefault(name, []).append(listener)

    def off(self, name, listener):
        """Undo the first on with these arguments. Raises ValueError when there is none."""
        self._listeners.get(name, []).remove(listener)

    def emit(self, name, *args):
        """Send an event: call its listeners with args."""
        for listener in self._listeners.get(name, ()):
            listener(*args)
