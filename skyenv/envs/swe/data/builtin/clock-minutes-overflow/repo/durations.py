"""Durations as text."""


def clock(seconds):
    """Return seconds as h:mm:ss."""
    hours = seconds // 3600
    minutes = seconds // 60
    return "%d:%02d:%02d" % (hours, minutes, seconds % 60)


def in_seconds(text):
    """Return h:mm:ss as a number of seconds."""
    hours, minutes, seconds = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds)
