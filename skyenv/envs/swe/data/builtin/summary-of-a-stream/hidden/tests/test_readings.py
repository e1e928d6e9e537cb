import unittest

from readings import normalize, parse, summarize

LINES = ["# station 4", "1.5", "", "2.5  # calm", "5"]


class Streams(unittest.TestCase):
    def test_summary_of_a_generator(self):
        expected = {"count": 3, "mean": 3.0, "low": 1.5, "high": 5.0}
        self.assertEqual(summarize(parse(LINES)), expected)

    def test_summary_of_a_map(self):
        self.assertEqual(summarize(map(float, "12"))["mean"], 1.5)

    def test_normalized_generator(self):
        self.assertEqual(normalize(parse(["1", "2", "3"])), [0.0, 0.5, 1.0])

    def test_normalized_equal_values(self):
        self.assertEqual(normalize(iter([4, 4])), [0.0, 0.0])

    def test_normalized_nothing(self):
        self.assertEqual(normalize(iter([])), [])
        self.assertEqual(normalize([]), [])


class Lists(unittest.TestCase):
    def test_summary(self):
        self.assertEqual(summarize([4, 2]), {"count": 2, "mean": 3.0, "low": 2, "high": 4})

    def test_nothing(self):
        self.assertEqual(summarize([]), {"count": 0, "mean": None, "low": None, "high": None})
        self.assertEqual(summarize(parse(["#"]))["count"], 0)

    def test_argument_is_left_alone(self):
        values = [3, 1, 2]
        summarize(values)
        normalize(values)
        self.assertEqual(values, [3, 1, 2])

    def test_normalize(self):
        self.assertEqual(normalize([0, 5, 10]), [0.0, 0.5, 1.0])

    def test_parse(self):
        self.assertEqual(list(parse(LINES)), [1.5, 2.5, 5.0])
