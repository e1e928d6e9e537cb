"""Paths of addresses in segments."""

from urllib.parse import quote, unquote_plus


def split(path):
    """Return the decoded segments of a path; "/" has none."""
    path = unquote_plus(path)
    return path.split("/")[1:] if path != "/" else []


def join(segments):
    """Return the path of some segments, encoded so that split gives them back."""
    return "/" + "/".join(quote(segment) for segment in segments)
