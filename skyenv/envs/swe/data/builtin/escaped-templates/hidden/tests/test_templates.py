import unittest

from templates import render
from templates.filters import upper
from templates.markup import Markup, escape

VALUES = {"name": "Tom & Ann", "note": "<b>x</b>", "blank": " a<b ", "none": None, "count": 3, "nice": Markup("<i>")}


class Once(unittest.TestCase):
    def test_plain_field(self):
        self.assertEqual(render("{{ name }}", VALUES), "Tom &amp; Ann")

    def test_filter_before_escaping(self):
        self.assertEqual(render("{{ name | upper }}", VALUES), "TOM &amp; ANN")

    def test_two_filters(self):
        self.assertEqual(render("{{ blank | trim | upper }}", VALUES), "A&lt;B")

    def test_quotes(self):
        self.assertEqual(render("{{ q }}", {"q": '"<"'}), "&quot;&lt;&quot;")

    def test_safe_then_filter(self):
        self.assertEqual(render("{{ note | safe | upper }}", VALUES), "<B>X</B>")

    def test_safe(self):
        self.assertEqual(render("{{ note | safe }}", VALUES), "<b>x</b>")

    def test_value_that_is_markup(self):
        self.assertEqual(render("{{ nice }}{{ nice | trim }}", VALUES), "<i><i>")

    def test_escape_leaves_markup_alone(self):
        self.assertEqual(escape(escape("<")), "&lt;")

    def test_filters_of_unsafe_text_stay_unsafe(self):
        self.assertNotIsInstance(upper("<b>"), Markup)


class Kept(unittest.TestCase):
    def test_text_around_fields(self):
        self.assertEqual(render("<p>{{count}} of {{ count }}</p>", VALUES), "<p>3 of 3</p>")

    def test_unknown_name(self):
        self.assertEqual(render("[{{ nobody }}]", VALUES), "[]")

    def test_default(self):
        self.assertEqual(render("{{ nobody | default }}", VALUES), "-")

    def test_unknown_filter(self):
        with self.assertRaises(KeyError):
            render("{{ name | shout }}", VALUES)

    def test_numbers_in_filters(self):
        self.assertEqual(render("{{ count | upper }}", VALUES), "3")

    def test_escape_returns_markup(self):
        self.assertIsInstance(escape("a"), Markup)
