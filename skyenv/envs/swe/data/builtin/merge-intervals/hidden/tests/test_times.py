import unittest

from calendar_times import free, merge, total


class Merge(unittest.TestCase):
    def test_contained(self):
        self.assertEqual(merge([(9, 17), (10, 11)]), [(9, 17)])

    def test_touching(self):
        self.assertEqual(merge([(9, 10), (10, 11)]), [(9, 11)])

    def test_out_of_order(self):
        self.assertEqual(merge([(14, 15), (9, 10), (9.5, 12)]), [(9, 12), (14, 15)])

    def test_chain(self):
        self.assertEqual(merge([(1, 9), (2, 3), (4, 5), (8, 10)]), [(1, 10)])

    def test_argument_is_left_alone(self):
        intervals = [(5, 6), (1, 2)]
        self.assertEqual(merge(intervals), [(1, 2), (5, 6)])
        self.assertEqual(intervals, [(5, 6), (1, 2)])

    def test_any_iterable(self):
        self.assertEqual(merge(iter([(3, 4), (1, 3)])), [(1, 4)])

    def test_overlapping_in_order(self):
        self.assertEqual(merge([(1, 3), (2, 5), (7, 8)]), [(1, 5), (7, 8)])

    def test_separate_and_empty(self):
        self.assertEqual(merge([(1, 2), (3, 4)]), [(1, 2), (3, 4)])
        self.assertEqual(merge([]), [])


class Uses(unittest.TestCase):
    def test_free_around_a_long_meeting(self):
        self.assertEqual(free([(9, 12), (10, 11)], 8, 18), [(8, 9), (12, 18)])

    def test_total_of_unordered(self):
        self.assertEqual(total([(5, 9), (1, 2), (6, 7)]), 5)

    def test_free_day(self):
        self.assertEqual(free([], 8, 18), [(8, 18)])

    def test_busy_until_the_end(self):
        self.assertEqual(free([(8, 10), (12, 20)], 8, 18), [(10, 12)])
