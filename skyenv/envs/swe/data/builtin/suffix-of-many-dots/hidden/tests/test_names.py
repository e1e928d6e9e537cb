import unittest

from names import stem, suffix


class Names(unittest.TestCase):
    def test_two_dots(self):
        self.assertEqual(suffix("photo.old.png"), ".png")

    def test_three_dots(self):
        self.assertEqual(suffix("a.b.c.txt"), ".txt")

    def test_stem_keeps_inner_dots(self):
        self.assertEqual(stem("photo.old.png"), "photo.old")

    def test_one_dot(self):
        self.assertEqual((stem("a.py"), suffix("a.py")), ("a", ".py"))

    def test_no_dot(self):
        self.assertEqual((stem("Makefile"), suffix("Makefile")), ("Makefile", ""))

    def test_trailing_dot(self):
        self.assertEqual(suffix("odd."), ".")
