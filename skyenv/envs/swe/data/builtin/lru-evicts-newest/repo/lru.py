"""A cache that keeps what was used last."""

from collections import OrderedDict


class Cache:
    def __init__(self, size):
        self.size = size
        self._data = OrderedDict()

    def get(self, key, default=None):
        if key in self._data:
            self._data.move_to_end(key)
        return self._data.get(key, default)

    def put(self, key, value):
        self._data[key] = value
        self._data.move_to_end(key)
        if len(self._data) > self.size:
            self._data.popitem()
