import unittest

from lists import last, unique


class Unique(unittest.TestCase):
    def test_reported(self):
        self.assertEqual(unique([1, 1, 2]), [1, 2])

    def test_order(self):
        self.assertEqual(unique("banana"), ["b", "a", "n"])

    def test_no_repeats(self):
        self.assertEqual(unique([3, 1, 2]), [3, 1, 2])

    def test_empty(self):
        self.assertEqual(unique([]), [])


class Last(unittest.TestCase):
    def test_last(self):
        self.assertEqual(last([1, 2]), 2)

    def test_default(self):
        self.assertEqual(last([], 5), 5)
