import calendar
import unittest

from years import century, days_in_year, is_leap


class Leap(unittest.TestCase):
    def test_2000(self):
        self.assertTrue(is_leap(2000))

    def test_days_of_2400(self):
        self.assertEqual(days_in_year(2400), 366)

    def test_all_years(self):
        self.assertEqual([y for y in range(1583, 2500) if is_leap(y) != calendar.isleap(y)][:3], [])

    def test_common_century(self):
        self.assertEqual([is_leap(1900), is_leap(2100)], [False, False])

    def test_ordinary(self):
        self.assertEqual([is_leap(2023), is_leap(2024)], [False, True])

    def test_century(self):
        self.assertEqual([century(1900), century(1901), century(2000)], [19, 20, 20])
