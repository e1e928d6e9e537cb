"""A cache of limited size."""

from collections import OrderedDict


class Cache:
    """Keeps the entries that were used last; counts hits and misses of get."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be positive")
        self.size = size
        self.hits = 0
        self.misses = 0
        self._entries = OrderedDict()

    def get(self, key, default=None):
        """Return the value of key, which is used by that, or default."""
        if key not in self._entries:
            self.misses += 1
            return default
        self.hits += 1
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key, value):
        """Set the value of key, which is used by that."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)

    def keys(self):
        """Return the keys, the one unused for longest first."""
        return list(self._entries)

    def __contains__(self, key):
        return key in self._entries

    def __len__(self):
        return len(self._entries)
