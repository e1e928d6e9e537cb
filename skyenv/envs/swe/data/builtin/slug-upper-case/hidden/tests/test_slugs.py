import unittest

from slugs import slugify, unslug


class Slug(unittest.TestCase):
    def test_capitals(self):
        self.assertEqual(slugify("Hello World"), "hello-world")

    def test_all_capitals(self):
        self.assertEqual(slugify("README"), "readme")

    def test_mixed_with_digits(self):
        self.assertEqual(slugify("Top 10 Tips"), "top-10-tips")

    def test_lower_case(self):
        self.assertEqual(slugify("a quiet day"), "a-quiet-day")

    def test_punctuation_separates(self):
        self.assertEqual(slugify("one,two -- three!"), "one-two-three")

    def test_empty(self):
        self.assertEqual(slugify(" ... "), "")

    def test_back(self):
        self.assertEqual(unslug("a-quiet-day"), "A quiet day")
