import unittest

from bills import show, split, split_by_weight


class Rest(unittest.TestCase):
    def test_one_cent(self):
        self.assertEqual(split(1000, 3), [334, 333, 333])

    def test_two_cents(self):
        self.assertEqual(split(1001, 3), [334, 334, 333])

    def test_fewer_cents_than_people(self):
        self.assertEqual(split(2, 5), [1, 1, 0, 0, 0])

    def test_weights(self):
        self.assertEqual(split_by_weight(100, [1, 1, 4]), [17, 17, 66])

    def test_weight_zero_pays_nothing(self):
        self.assertEqual(split_by_weight(100, [0, 1, 0, 2]), [0, 34, 0, 66])

    def test_refund(self):
        self.assertEqual(split(-1000, 3), [-334, -333, -333])

    def test_sums(self):
        for total in range(-40, 41):
            for weights in ([1, 1, 1], [1, 2, 3, 4], [5, 0, 2], [7]):
                self.assertEqual(sum(split_by_weight(total, weights)), total)

    def test_large_bills_are_exact(self):
        total = 10**18 + 1
        self.assertEqual(split(total, 2), [5 * 10**17 + 1, 5 * 10**17])


class Kept(unittest.TestCase):
    def test_even(self):
        self.assertEqual(split(900, 3), [300, 300, 300])

    def test_even_weights(self):
        self.assertEqual(split_by_weight(60, [1, 2, 3]), [10, 20, 30])

    def test_one_person(self):
        self.assertEqual(split(77, 1), [77])

    def test_show(self):
        self.assertEqual((show(5), show(-1234)), ("0.05", "-12.34"))
