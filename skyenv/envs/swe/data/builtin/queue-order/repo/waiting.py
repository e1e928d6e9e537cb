"""A queue of guests."""


class Queue:
    def __init__(self):
        self._guests = []

    def join(self, guest):
        """Put guest at the end."""
        self._guests.append(guest)

    def take(self):
        """Remove and return the guest who waits for longest."""
        return self._guests.pop()

    def __len__(self):
        return len(self._guests)
