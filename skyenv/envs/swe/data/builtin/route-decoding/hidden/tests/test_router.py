import unittest

from web.paths import join, split
from web.router import Router


def router():
    made = Router()
    made.add("home", "/")
    made.add("files", "/files")
    made.add("new", "/files/new")
    made.add("file", "/files/<name>")
    made.add("line", "/files/<name>/lines/<number>")
    return made


class Encoded(unittest.TestCase):
    def test_link_leads_back(self):
        for name in ("a/b 100%", "a+b", "%2F", "50%25", "\u00fc?#", "a b", "<x>"):
            path = router().url_for("file", name=name)
            self.assertEqual(router().match(path), ("file", {"name": name}))

    def test_slash_in_a_segment(self):
        self.assertEqual(router().match("/files/a%2Fb/lines/7"), ("line", {"name": "a/b", "number": "7"}))

    def test_decoded_once(self):
        self.assertEqual(router().match("/files/%252F"), ("file", {"name": "%2F"}))

    def test_plus_is_a_plus(self):
        self.assertEqual(split("/a+b"), ["a+b"])

    def test_join_encodes_slashes(self):
        self.assertEqual(split(join(["a/b", "c"])), ["a/b", "c"])


class TrailingSlash(unittest.TestCase):
    def test_static_route(self):
        self.assertEqual(router().match("/files/"), ("files", {}))

    def test_parameter(self):
        self.assertEqual(router().match("/files/a/"), ("file", {"name": "a"}))

    def test_home(self):
        self.assertEqual(router().match("/"), ("home", {}))


class Kept(unittest.TestCase):
    def test_first_route_wins(self):
        self.assertEqual(router().match("/files/new"), ("new", {}))

    def test_parameters(self):
        self.assertEqual(router().match("/files/a/lines/3"), ("line", {"name": "a", "number": "3"}))

    def test_no_route(self):
        self.assertIsNone(router().match("/other"))
        self.assertIsNone(router().match("/files/a/b/c/d"))

    def test_encoded_plain_segment(self):
        self.assertEqual(router().match("/files/a%20b"), ("file", {"name": "a b"}))

    def test_url_for(self):
        self.assertEqual(router().url_for("line", name="a", number="3"), "/files/a/lines/3")
        self.assertEqual(router().url_for("home"), "/")

    def test_missing_parameter(self):
        with self.assertRaises(KeyError):
            router().url_for("file")
