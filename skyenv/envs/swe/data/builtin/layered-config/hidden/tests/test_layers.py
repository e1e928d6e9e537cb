import copy
import unittest

from conf import load
from conf.merge import lookup, merge

DEFAULTS = {"editor": {"font": {"family": "mono", "size": 10}, "tabs": 4}, "theme": "light"}


class Layers(unittest.TestCase):
    def setUp(self):
        self.defaults = copy.deepcopy(DEFAULTS)

    def test_defaults_are_left_alone(self):
        load(self.defaults, '{"editor": {"tabs": 8, "font": {"size": 14}}}')
        self.assertEqual(self.defaults, DEFAULTS)

    def test_deep_sections_are_merged(self):
        settings = load(self.defaults, '{"editor": {"font": {"size": 14}}}')
        self.assertEqual(settings["editor"], {"font": {"family": "mono", "size": 14}, "tabs": 4})

    def test_changing_the_result_changes_nothing_else(self):
        load(self.defaults)["editor"]["font"]["size"] = 99
        self.assertEqual(self.defaults, DEFAULTS)

    def test_null_removes_a_deep_key(self):
        settings = load(self.defaults, '{"editor": {"font": {"family": null}}}')
        self.assertEqual(settings["editor"]["font"], {"size": 10})

    def test_merge_changes_neither_side(self):
        below, above = {"a": {"b": {"c": 1}}}, {"a": {"b": {"d": 2}}}
        self.assertEqual(merge(below, above), {"a": {"b": {"c": 1, "d": 2}}})
        self.assertEqual((below, above), ({"a": {"b": {"c": 1}}}, {"a": {"b": {"d": 2}}}))

    def test_null_inside_a_new_section_is_dropped(self):
        self.assertEqual(merge({}, {"a": {"b": None, "c": 1}}), {"a": {"c": 1}})

    def test_top_level(self):
        self.assertEqual(load(self.defaults, '{"theme": "dark"}')["theme"], "dark")

    def test_null_removes_a_section(self):
        self.assertEqual(load(self.defaults, '{"editor": null}'), {"theme": "light"})

    def test_value_replaces_section(self):
        self.assertEqual(load(self.defaults, '{"editor": "vi"}')["editor"], "vi")

    def test_last_text_wins(self):
        settings = load(self.defaults, '{"theme": "dark"}', "", '{"theme": "blue"}')
        self.assertEqual(settings["theme"], "blue")

    def test_not_an_object(self):
        with self.assertRaises(ValueError):
            load(self.defaults, "[1]")

    def test_lookup(self):
        self.assertEqual(lookup(DEFAULTS, "editor.font.size"), 10)
