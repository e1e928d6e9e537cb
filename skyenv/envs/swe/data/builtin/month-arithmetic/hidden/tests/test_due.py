import unittest
from datetime import date

from due import add_months, installments, is_month_end, month_length


class Ends(unittest.TestCase):
    def test_short_month(self):
        self.assertEqual(add_months(date(2023, 1, 31), 1), date(2023, 2, 28))
        self.assertEqual(add_months(date(2024, 1, 31), 1), date(2024, 2, 29))

    def test_into_december(self):
        self.assertEqual(add_months(date(2023, 1, 15), 11), date(2023, 12, 15))
        self.assertEqual(add_months(date(2023, 11, 30), 1), date(2023, 12, 30))

    def test_back_over_the_year(self):
        self.assertEqual(add_months(date(2024, 1, 15), -1), date(2023, 12, 15))
        self.assertEqual(add_months(date(2024, 3, 31), -13), date(2023, 2, 28))

    def test_leap_day(self):
        self.assertEqual(add_months(date(2024, 2, 29), 12), date(2025, 2, 28))
        self.assertEqual(add_months(date(2024, 2, 29), 48), date(2028, 2, 29))

    def test_installments_return_to_the_31st(self):
        dues = installments(date(2023, 12, 31), 4)
        self.assertEqual([(d.month, d.day) for d in dues], [(12, 31), (1, 31), (2, 29), (3, 31)])

    def test_whole_years(self):
        self.assertEqual(add_months(date(2023, 12, 5), 24), date(2025, 12, 5))


class Plain(unittest.TestCase):
    def test_within_the_year(self):
        self.assertEqual(add_months(date(2023, 3, 15), 4), date(2023, 7, 15))

    def test_zero(self):
        self.assertEqual(add_months(date(2023, 3, 31), 0), date(2023, 3, 31))

    def test_into_the_next_year(self):
        self.assertEqual(add_months(date(2023, 11, 30), 3 - 1), date(2024, 1, 30))

    def test_month_ends(self):
        self.assertTrue(is_month_end(date(2023, 4, 30)))
        self.assertFalse(is_month_end(date(2024, 2, 28)))
        self.assertEqual(month_length(2024, 2), 29)
