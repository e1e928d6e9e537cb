import unittest

from words import count_words, split_words


class Count(unittest.TestCase):
    def test_twice(self):
        self.assertEqual(count_words("to be or not to be"), {"to": 2, "be": 2, "or": 1, "not": 1})

    def test_thrice(self):
        self.assertEqual(count_words("a a a"), {"a": 3})

    def test_case_and_marks(self):
        self.assertEqual(count_words("No, no. Yes!"), {"no": 2, "yes": 1})

    def test_once_each(self):
        self.assertEqual(count_words("one two"), {"one": 1, "two": 1})

    def test_marks_alone(self):
        self.assertEqual(count_words("- ... x"), {"-": 1, "x": 1})

    def test_split(self):
        self.assertEqual(split_words("Hi, You"), ["hi", "you"])
