import unittest

from durations import clock, in_seconds


class Clock(unittest.TestCase):
    def test_over_an_hour(self):
        self.assertEqual(clock(3661), "1:01:01")

    def test_one_hour(self):
        self.assertEqual(clock(3600), "1:00:00")

    def test_long(self):
        self.assertEqual(clock(100 * 3600 + 59 * 60 + 59), "100:59:59")

    def test_round_trip(self):
        self.assertEqual([n for n in range(0, 90000, 997) if in_seconds(clock(n)) != n][:3], [])

    def test_under_an_hour(self):
        self.assertEqual(clock(3599), "0:59:59")

    def test_zero(self):
        self.assertEqual(clock(0), "0:00:00")

    def test_back(self):
        self.assertEqual(in_seconds("2:03:04"), 7384)
