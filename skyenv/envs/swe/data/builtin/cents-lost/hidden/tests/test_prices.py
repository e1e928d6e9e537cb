import unittest

from prices import show, to_cents, total


class Cents(unittest.TestCase):
    def test_reported_prices(self):
        self.assertEqual(to_cents(19.99), 1999)
        self.assertEqual(to_cents(0.29), 29)

    def test_every_price_up_to_ten(self):
        self.assertEqual([n for n in range(1001) if to_cents(n / 100) != n][:3], [])

    def test_total(self):
        self.assertEqual(total([19.99, 0.29, 1]), 2128)

    def test_whole_number(self):
        cents = to_cents(5.0)
        self.assertEqual(cents, 500)
        self.assertIsInstance(cents, int)

    def test_exact_fraction(self):
        self.assertEqual(to_cents(2.25), 225)

    def test_show(self):
        self.assertEqual(show(1905), "19.05")
