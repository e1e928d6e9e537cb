import unittest

from batches import chunks, pairs


class Chunks(unittest.TestCase):
    def test_short_last_piece(self):
        self.assertEqual(list(chunks([1, 2, 3], 2)), [[1, 2], [3]])

    def test_even_pieces(self):
        self.assertEqual(list(chunks("abcdef", 3)), ["abc", "def"])

    def test_fewer_items_than_size(self):
        self.assertEqual(list(chunks([1], 5)), [[1]])

    def test_one_by_one(self):
        self.assertEqual(list(chunks([1, 2, 3], 1)), [[1], [2], [3]])

    def test_nothing(self):
        self.assertEqual(list(chunks([], 3)), [])


class Pairs(unittest.TestCase):
    def test_pairs(self):
        self.assertEqual(pairs([1, 2, 3]), [(1, 2), (2, 3)])

    def test_too_few(self):
        self.assertEqual(pairs([1]), [])
