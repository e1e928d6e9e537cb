"""Build files: lines of the form "target: need need"."""


class BuildError(Exception):
    """The build file is wrong."""


def parse(text):
    """Return the needs of each target, in the order of the file."""
    needs = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].rstrip()
        if not line:
            continue
        target, colon, rest = line.partition(":")
        if not colon or not target.strip():
            raise BuildError("line %d: expected 'target: needs'" % number)
        target = target.strip()
        if target in needs:
            raise BuildError("line %d: %s is defined twice" % (number, target))
        needs[target] = rest.split()
    return needs
