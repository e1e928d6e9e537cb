import unittest

from calc import evaluate


class Powers(unittest.TestCase):
    def test_power(self):
        self.assertEqual(evaluate("2 ^ 10"), 1024)

    def test_groups_from_the_right(self):
        self.assertEqual(evaluate("2^3^2"), 512)

    def test_binds_tighter_than_product(self):
        self.assertEqual(evaluate("3 * 2 ^ 2 / 4"), 3)

    def test_of_a_group(self):
        self.assertEqual(evaluate("(1 + 1) ^ (3 - 1)"), 4)


class Signs(unittest.TestCase):
    def test_in_front(self):
        self.assertEqual(evaluate("-3 + 5"), 2)

    def test_below_power(self):
        self.assertEqual(evaluate("-2^2"), -4)

    def test_in_exponent(self):
        self.assertEqual(evaluate("2^-1"), 0.5)

    def test_after_operator(self):
        self.assertEqual((evaluate("2 * -3"), evaluate("2 - -3"), evaluate("6 / -(1 + 1)")), (-6, 5, -3))

    def test_repeated(self):
        self.assertEqual((evaluate("--2"), evaluate("-+-+2")), (2, 2))


class Names(unittest.TestCase):
    def test_value(self):
        self.assertEqual(evaluate("2 * x", {"x": 4}), 8)

    def test_long_name(self):
        self.assertEqual(evaluate("-rate_2 ^ 2", {"rate_2": 3}), -9)

    def test_unknown(self):
        with self.assertRaisesRegex(SyntaxError, "price"):
            evaluate("price + 1", {"prices": 1})
        with self.assertRaisesRegex(SyntaxError, "x"):
            evaluate("x")


class Rest(unittest.TestCase):
    def test_leftovers(self):
        for text in ("1 2", "(1) (2)", "1 )", "2 x"):
            with self.assertRaises(SyntaxError):
                evaluate(text, {"x": 1})


class Kept(unittest.TestCase):
    def test_left_to_right(self):
        self.assertEqual((evaluate("8 - 3 - 2"), evaluate("16 / 4 / 2")), (3, 2))

    def test_numbers(self):
        self.assertEqual((evaluate("1.5 + .5"), evaluate("2."), evaluate(" 7 ")), (2, 2, 7))

    def test_nested(self):
        self.assertEqual(evaluate("((2 + (3)) * 2)"), 10)

    def test_errors(self):
        for text in ("", "1 +", "* 2", "(1", "()", "1 & 2"):
            with self.assertRaises(SyntaxError):
                evaluate(text)

    def test_division_by_zero(self):
        with self.assertRaises(ZeroDivisionError):
            evaluate("1 / 0")
