import unittest

from tables import column, transpose, width


class Transpose(unittest.TestCase):
    def test_wide(self):
        self.assertEqual(transpose([[1, 2, 3], [4, 5, 6]]), [[1, 4], [2, 5], [3, 6]])

    def test_tall(self):
        self.assertEqual(transpose([[1], [2], [3]]), [[1, 2, 3]])

    def test_twice(self):
        rows = [["a", "b", "c", "d"]]
        self.assertEqual(transpose(transpose(rows)), rows)

    def test_square(self):
        self.assertEqual(transpose([[1, 2], [3, 4]]), [[1, 3], [2, 4]])

    def test_empty(self):
        self.assertEqual(transpose([]), [])

    def test_column_and_width(self):
        self.assertEqual((column([[1, 2], [3, 4]], 1), width([[1, 2, 3]])), ([2, 4], 3))
