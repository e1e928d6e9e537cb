import unittest

from rows import join_row, split_row


class Plain(unittest.TestCase):
    def test_split(self):
        self.assertEqual(split_row("a,b"), ["a", "b"])

    def test_join(self):
        self.assertEqual(join_row(["a", "b"]), "a,b")
