import unittest

from search import contains, find


class Find(unittest.TestCase):
    def test_last(self):
        self.assertEqual(find([1, 3, 5], 5), 2)

    def test_single(self):
        self.assertEqual(find([4], 4), 0)

    def test_every_item(self):
        items = list(range(0, 40, 2))
        self.assertEqual([find(items, item) for item in items], list(range(20)))

    def test_contains(self):
        self.assertTrue(contains([1, 2], 2))

    def test_middle(self):
        self.assertEqual(find([1, 3, 5], 3), 1)

    def test_absent(self):
        self.assertEqual([find([1, 3, 5], n) for n in (0, 2, 4, 6)], [-1] * 4)

    def test_empty(self):
        self.assertFalse(contains([], 1))
