import unittest

from league import award, podium, ranking


class Ties(unittest.TestCase):
    def test_shared_first_place(self):
        rows = ranking({"zoe": 9, "ann": 9, "bob": 4})
        self.assertEqual(rows, [(1, "ann", 9), (1, "zoe", 9), (3, "bob", 4)])

    def test_tie_in_the_middle(self):
        rows = ranking({"d": 1, "c": 5, "b": 5, "a": 8, "e": 5})
        self.assertEqual(rows, [(1, "a", 8), (2, "b", 5), (2, "c", 5), (2, "e", 5), (5, "d", 1)])

    def test_all_equal(self):
        self.assertEqual([place for place, _, _ in ranking(dict.fromkeys("cab", 0))], [1, 1, 1])

    def test_podium_with_a_shared_third_place(self):
        self.assertEqual(podium({"a": 9, "b": 8, "d": 7, "c": 7, "e": 6}), ["a", "b", "c", "d"])

    def test_negative_points(self):
        self.assertEqual(ranking({"b": -1, "a": -1}), [(1, "a", -1), (1, "b", -1)])


class Plain(unittest.TestCase):
    def test_distinct(self):
        self.assertEqual(ranking({"a": 1, "b": 3, "c": 2}), [(1, "b", 3), (2, "c", 2), (3, "a", 1)])

    def test_empty(self):
        self.assertEqual((ranking({}), podium({})), ([], []))

    def test_fractions(self):
        self.assertEqual(ranking({"a": 0.5, "b": 0.75}), [(1, "b", 0.75), (2, "a", 0.5)])

    def test_award(self):
        points = {"a": 1}
        self.assertEqual((award(points, "a", 2), award(points, "b", 2)), ({"a": 3}, {"a": 1, "b": 2}))
