import unittest

from ranges import clamp, inside


class Clamp(unittest.TestCase):
    def test_above(self):
        self.assertEqual(clamp(15, 0, 10), 10)

    def test_between(self):
        self.assertEqual(clamp(7, 0, 10), 7)
        self.assertEqual(clamp(-1.5, -2, 2), -1.5)

    def test_on_the_upper_bound(self):
        self.assertEqual(clamp(10, 3, 10), 10)

    def test_below(self):
        self.assertEqual(clamp(-3, 0, 10), 0)

    def test_empty_range(self):
        self.assertEqual(clamp(8, 4, 4), 4)


class Inside(unittest.TestCase):
    def test_bounds_count(self):
        self.assertTrue(inside(0, 0, 1) and inside(1, 0, 1))

    def test_outside(self):
        self.assertFalse(inside(2, 0, 1))
