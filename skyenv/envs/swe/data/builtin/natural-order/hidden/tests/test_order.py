import unittest

from order import first, natural_sort


class Natural(unittest.TestCase):
    def test_number_at_the_end(self):
        self.assertEqual(natural_sort(["chapter 10", "chapter 9"]), ["chapter 9", "chapter 10"])

    def test_number_in_the_middle(self):
        self.assertEqual(natural_sort(["a12b", "a2c", "a2b"]), ["a2b", "a2c", "a12b"])

    def test_several_numbers(self):
        names = ["v1.10.0", "v1.9.12", "v1.9.2", "v0.100"]
        self.assertEqual(natural_sort(names), ["v0.100", "v1.9.2", "v1.9.12", "v1.10.0"])

    def test_digits_and_letters_at_the_start(self):
        self.assertEqual(natural_sort(["b", "10", "9", "a", "100 x"]), ["9", "10", "100 x", "a", "b"])

    def test_letter_against_digit_inside(self):
        self.assertEqual(natural_sort(["ab", "a1", "aB2", "a"]), ["a", "a1", "ab", "aB2"])

    def test_case_after_numbers(self):
        self.assertEqual(natural_sort(["10 b", "10 A"]), ["10 A", "10 b"])

    def test_first_of_numbers(self):
        self.assertEqual(first(["file20", "file3"]), "file3")

    def test_leading_zeros_keep_their_order(self):
        self.assertEqual(natural_sort(["x01", "x1", "x001"]), ["x01", "x1", "x001"])


class Kept(unittest.TestCase):
    def test_plain_words(self):
        self.assertEqual(natural_sort(["pear", "Apple", "fig"]), ["Apple", "fig", "pear"])

    def test_equal_keys_keep_their_order(self):
        self.assertEqual(natural_sort(["B", "b", "a"]), ["a", "B", "b"])

    def test_single_digits(self):
        self.assertEqual(natural_sort(["b2", "b1"]), ["b1", "b2"])

    def test_first(self):
        self.assertEqual((first([]), first(["b", "a"])), (None, "a"))
