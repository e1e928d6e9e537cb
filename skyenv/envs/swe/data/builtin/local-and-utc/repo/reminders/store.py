"""Reminders as lines of text: a time, a tab and a message."""

from datetime import datetime

FORMAT = "%Y-%m-%d %H:%M"


def dump(reminders):
    """Return reminders, pairs of an aware datetime and a message, as text."""
    return "".join("%s\t%s\n" % (when.strftime(FORMAT), message) for when, message in reminders)


def load(text):
    """Return the reminders in text, in the order of their lines."""
    reminders = []
    for line in text.splitlines():
        when, _, message = line.partition("\t")
        reminders.append((datetime.strptime(when, FORMAT), message))
    return reminders
