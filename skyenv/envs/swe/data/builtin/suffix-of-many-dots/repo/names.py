"""Names of files."""


def suffix(name):
    """Return the last dot of name and what follows; empty when there is none."""
    if "." not in name:
        return ""
    return name[name.find("."):]


def stem(name):
    """Return name without its suffix."""
    end = suffix(name)
    return name[:len(name) - len(end)]
