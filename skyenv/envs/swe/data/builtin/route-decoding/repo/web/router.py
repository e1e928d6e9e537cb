"""Routes such as "/files/<name>"."""

from urllib.parse import unquote

from web.paths import join, split


class Router:
    def __init__(self):
        self._routes = {}

    def add(self, name, pattern):
        """Name a pattern; a segment in angle brackets is a parameter that takes any one segment."""
        self._routes[name] = split(pattern)

    def match(self, path):
        """Return (name, parameters) of the first route that path fits, or None for no route."""
        segments = split(path)
        for name, pattern in self._routes.items():
            if len(pattern) == len(segments):
                found = self._bind(pattern, segments)
                if found is not None:
                    return name, found
        return None

    def url_for(self, route, /, **parameters):
        """Return the path of a route. Raises KeyError for an unknown route or a missing parameter."""
        return join(parameters[part[1:-1]] if _is_parameter(part) else part for part in self._routes[route])

    @staticmethod
    def _bind(pattern, segments):
        found = {}
        for part, segment in zip(pattern, segments):
            if _is_parameter(part):
                found[part[1:-1]] = unquote(segment)
            elif part != segment:
                return None
        return found


def _is_parameter(part):
    return part.startswith("<") and part.endswith(">")
