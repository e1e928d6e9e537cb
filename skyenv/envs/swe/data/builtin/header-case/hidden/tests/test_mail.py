import unittest

from mail.headers import Headers
from mail.message import forward, parse


def raw(*lines, body=b""):
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body


class Case(unittest.TestCase):
    def test_length_in_lower_case(self):
        self.assertEqual(parse(raw("content-length: 5", body=b"hello...")).body, b"hello")

    def test_charset_in_upper_case(self):
        message = parse(raw("CONTENT-TYPE: text/plain; charset=latin-1", "Content-Length: 1", body=b"\xfc"))
        self.assertEqual(message.text, "\u00fc")

    def test_parameter_in_upper_case(self):
        message = parse(raw('Content-Type: text/plain; Charset="latin-1"', "Content-Length: 1", body=b"\xe9"))
        self.assertEqual(message.text, "\u00e9")

    def test_headers(self):
        headers = Headers([("X-Tag", "a"), ("x-tag", "b")])
        self.assertEqual(headers.get("X-TAG"), "a")
        self.assertEqual(headers.get_all("x-Tag"), ["a", "b"])
        self.assertIn("x-TAG", headers)
        self.assertEqual(len(headers), 2)


class Repeated(unittest.TestCase):
    LINES = ("Received: by one", "Received: by two", "x-Odd: 1")

    def test_all_values(self):
        headers = parse(raw(*self.LINES)).headers
        self.assertEqual(headers.get_all("Received"), ["by one", "by two"])
        self.assertEqual(headers.get("Received"), "by one")

    def test_forward_keeps_lines_and_spelling(self):
        data = forward(parse(raw(*self.LINES)), "three")
        self.assertEqual(data, raw("Received: by three", *self.LINES))

    def test_forward_twice(self):
        data = forward(parse(forward(parse(raw("A: 1")), "x")), "y")
        self.assertEqual(data, raw("Received: by y", "Received: by x", "A: 1"))


class Kept(unittest.TestCase):
    def test_usual_message(self):
        message = parse(raw("Content-Type: text/plain; charset=utf-8", "Content-Length: 2", body=b"\xc3\xbc!"))
        self.assertEqual(message.text, "\u00fc")

    def test_no_length_no_body(self):
        self.assertEqual(parse(raw("A: b", body=b"xyz")).body, b"")

    def test_value_with_colon(self):
        self.assertEqual(parse(raw("When: 10:30")).headers.get("When"), "10:30")

    def test_default(self):
        headers = Headers()
        self.assertEqual((headers.get("A", 1), headers.get_all("A"), "A" in headers), (1, [], False))

    def test_order(self):
        self.assertEqual(list(Headers([("B", " 1 "), ("A", "2")])), [("B", "1"), ("A", "2")])
