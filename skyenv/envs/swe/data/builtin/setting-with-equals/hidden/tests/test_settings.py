import unittest

from settings import parse


class Parse(unittest.TestCase):
    def test_equals_in_value(self):
        self.assertEqual(parse("query=a=b"), {"query": "a=b"})

    def test_padding(self):
        self.assertEqual(parse("key = c2VjcmV0=="), {"key": "c2VjcmV0=="})

    def test_many(self):
        self.assertEqual(parse("a=1=2=3\nb=4"), {"a": "1=2=3", "b": "4"})

    def test_plain(self):
        self.assertEqual(parse("host = here\nport=80\n"), {"host": "here", "port": "80"})

    def test_comments_and_blanks(self):
        self.assertEqual(parse("# a=b\n\n  \nc="), {"c": ""})

    def test_line_without_equals(self):
        with self.assertRaises(ValueError):
            parse("nonsense")
