"""Settings written as name=value, one a line."""


def parse(text):
    """Return the settings of text as a dict; # starts a comment line."""
    found = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, value = line.split("=")
        found[name.strip()] = value.strip()
    return found
