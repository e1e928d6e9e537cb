import unittest

from lru import Cache


class Lru(unittest.TestCase):
    def test_oldest_goes(self):
        cache = Cache(2)
        for key in "abc":
            cache.put(key, key.upper())
        self.assertEqual([cache.get(key) for key in "abc"], [None, "B", "C"])

    def test_reading_counts_as_use(self):
        cache = Cache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual([cache.get(key) for key in "abc"], [1, None, 3])

    def test_size_one(self):
        cache = Cache(1)
        cache.put("a", 1)
        cache.put("b", 2)
        self.assertEqual(cache.get("b"), 2)

    def test_room_left(self):
        cache = Cache(3)
        cache.put("a", 1)
        cache.put("b", 2)
        self.assertEqual((cache.get("a"), cache.get("b")), (1, 2))

    def test_default(self):
        self.assertEqual(Cache(1).get("a", 7), 7)

    def test_overwrite(self):
        cache = Cache(1)
        cache.put("a", 1)
        cache.put("a", 2)
        self.assertEqual(cache.get("a"), 2)
