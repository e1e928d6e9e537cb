import unittest

from conf.merge import lookup


class Lookup(unittest.TestCase):
    def test_found(self):
        self.assertEqual(lookup({"a": {"b": 1}}, "a.b"), 1)

    def test_absent(self):
        self.assertEqual(lookup({"a": 1}, "a.b", "none"), "none")
