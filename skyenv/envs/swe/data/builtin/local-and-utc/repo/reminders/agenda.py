"""What is due."""

from datetime import timedelta

from reminders.store import dump, load


class Agenda:
    def __init__(self, text=""):
        self._reminders = load(text)

    def add(self, when, message):
        """Add a reminder at an aware datetime. Raises ValueError for a naive one."""
        if when.tzinfo is None:
            raise ValueError("a reminder needs a time with an offset")
        self._reminders.append((when, message))

    def snooze(self, message, minutes):
        """Move all reminders with message."""
        delay = timedelta(minutes=minutes)
        self._reminders = [(w + delay, m) if m == message else (w, m) for w, m in self._reminders]

    def due(self, now):
        """Return the messages due at the aware datetime now, earliest first, and forget them."""
        ready = sorted((w, m) for w, m in self._reminders if w <= now)
        self._reminders = [(w, m) for w, m in self._reminders if w > now]
        return [message for _, message in ready]

    def save(self):
        """Return the text from which an equal agenda can be made."""
        return dump(self._reminders)
