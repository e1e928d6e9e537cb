import unittest

from stats import mean, median


class Median(unittest.TestCase):
    def test_four(self):
        self.assertEqual(median([1, 2, 3, 4]), 2.5)

    def test_two(self):
        self.assertEqual(median([10, 20]), 15)

    def test_unsorted(self):
        self.assertEqual(median([9, 1, 8, 2, 3, 7]), 5)

    def test_odd(self):
        self.assertEqual(median([5, 1, 3]), 3)

    def test_one(self):
        self.assertEqual(median([4]), 4)

    def test_argument_is_left_alone(self):
        values = [3, 1, 2]
        median(values)
        self.assertEqual(values, [3, 1, 2])

    def test_mean(self):
        self.assertEqual(mean([1, 2, 6]), 3)
