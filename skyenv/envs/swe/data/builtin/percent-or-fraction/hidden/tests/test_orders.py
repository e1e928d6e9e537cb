import unittest

from shop.orders import Order
from shop.pricing import best, discounted
from shop.vouchers import Voucher, VoucherBook

BOOK = VoucherBook([Voucher("SPRING", 20), Voucher("tiny", 1), Voucher("FREE", 100)])


class Vouchers(unittest.TestCase):
    def test_twenty_percent(self):
        self.assertEqual(Order(BOOK, "SPRING").add("book", 5000).total(), 4000)

    def test_one_percent(self):
        self.assertEqual(Order(BOOK, "Tiny").add("book", 5000).total(), 4950)

    def test_member_with_a_better_sale(self):
        order = Order(BOOK, "SPRING", sale=0.5, member=True).add("book", 1000)
        self.assertEqual(order.total(), 500)

    def test_member_with_a_better_voucher(self):
        order = Order(BOOK, "SPRING", sale=0.1, member=True).add("book", 1000, 2)
        self.assertEqual(order.total(), 1600)

    def test_receipt(self):
        order = Order(BOOK, "spring").add("pen", 250, 2)
        self.assertEqual(order.receipt(), ["2x pen", "SPRING: 20% off", "total 4.00"])


class Kept(unittest.TestCase):
    def test_full_discount(self):
        self.assertEqual(Order(BOOK, "FREE").add("book", 5000).total(), 0)

    def test_sale(self):
        self.assertEqual(Order(BOOK, sale=0.2).add("book", 5000).total(), 4000)

    def test_unknown_code_leaves_the_sale(self):
        self.assertEqual(Order(BOOK, "NOPE", sale=0.2).add("book", 5000).total(), 4000)

    def test_no_discount(self):
        self.assertEqual(Order(BOOK).add("a", 1, 3).add("b", 2).total(), 5)

    def test_label_shows_percent(self):
        self.assertEqual(Voucher("A", 15).label(), "A: 15% off")

    def test_pricing_takes_fractions(self):
        self.assertEqual((discounted(999, 0.5), discounted(100, 1), best()), (500, 0, 0))

    def test_percent_is_checked(self):
        for percent in (0, 101, -5):
            with self.assertRaises(ValueError):
                Voucher("A", percent)
