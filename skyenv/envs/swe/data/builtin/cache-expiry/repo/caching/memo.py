"""Functions that remember their results."""

import functools


def memoize(cache):
    """Make a decorator that keeps results, by positional arguments, in cache."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            key = (function.__qualname__, args)
            value = cache.get(key)
            if value is None:
                value = function(*args)
                cache.put(key, value)
            return value

        return wrapper

    return decorate
