import unittest

from caching import Cache, memoize


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Expiry(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()

    def cache(self, size=3, **options):
        return Cache(size, clock=self.clock, **options)

    def test_lives_for_its_time(self):
        cache = self.cache(ttl=10)
        cache.put("a", 1)
        self.clock.now += 9.9
        self.assertEqual(cache.get("a"), 1)
        self.clock.now += 0.1
        self.assertIsNone(cache.get("a"))

    def test_reading_does_not_prolong(self):
        cache = self.cache(ttl=10)
        cache.put("a", 1)
        for _ in range(4):
            self.clock.now += 3
            cache.get("a")
        self.assertNotIn("a", cache)

    def test_putting_again_prolongs(self):
        cache = self.cache(ttl=10)
        cache.put("a", 1)
        self.clock.now += 6
        cache.put("a", 2)
        self.clock.now += 6
        self.assertEqual(cache.get("a"), 2)

    def test_own_time(self):
        cache = self.cache(ttl=10)
        cache.put("short", 1, ttl=1)
        cache.put("ever", 2, ttl=None)
        cache.put("usual", 3)
        self.clock.now += 5
        self.assertEqual(cache.keys(), ["ever", "usual"])
        self.clock.now += 500
        self.assertEqual(cache.keys(), ["ever"])

    def test_all_views_agree(self):
        cache = self.cache(ttl=1)
        cache.put("a", 1)
        self.clock.now += 2
        self.assertEqual((len(cache), cache.keys(), "a" in cache), (0, [], False))
        self.assertEqual((cache.get("a", 7), cache.hits, cache.misses), (7, 0, 1))

    def test_expired_goes_before_live(self):
        cache = self.cache(size=2)
        cache.put("old", 1)
        cache.put("brief", 2, ttl=1)
        self.clock.now += 2
        cache.put("new", 3)
        self.assertEqual(cache.keys(), ["old", "new"])

    def test_memoize_again_after_expiry(self):
        calls = []

        @memoize(self.cache(ttl=10))
        def double(number):
            calls.append(number)
            return 2 * number

        double(2), double(2)
        self.clock.now += 11
        self.assertEqual((double(2), calls), (4, [2, 2]))

    def test_no_time_lives_for_ever(self):
        cache = self.cache()
        cache.put("a", None)
        self.clock.now += 10**9
        self.assertIn("a", cache)


class Memoize(unittest.TestCase):
    def test_none_is_remembered(self):
        calls = []

        @memoize(Cache(5))
        def nothing(number):
            calls.append(number)

        self.assertEqual((nothing(1), nothing(1), calls), (None, None, [1]))

    def test_by_arguments(self):
        calls = []

        @memoize(Cache(5))
        def add(a, b):
            """Sum."""
            calls.append((a, b))
            return a + b

        self.assertEqual((add(1, 2), add(2, 1), add(1, 2)), (3, 3, 3))
        self.assertEqual((calls, add.__doc__), ([(1, 2), (2, 1)], "Sum."))


class Kept(unittest.TestCase):
    def test_least_recently_used_goes(self):
        cache = Cache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual(cache.keys(), ["a", "c"])

    def test_counters(self):
        cache = Cache(2)
        cache.put("a", 1)
        cache.get("a"), cache.get("b")
        self.assertEqual((cache.hits, cache.misses, len(cache)), (1, 1, 1))

    def test_containment_is_no_use(self):
        cache = Cache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        self.assertIn("a", cache)
        cache.put("c", 3)
        self.assertNotIn("a", cache)

    def test_size(self):
        with self.assertRaises(ValueError):
            Cache(0)
