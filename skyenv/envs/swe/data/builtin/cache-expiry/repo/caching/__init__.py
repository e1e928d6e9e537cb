"""Caches in memory."""

from caching.cache import Cache
from caching.memo import memoize

__all__ = ["Cache", "memoize"]
