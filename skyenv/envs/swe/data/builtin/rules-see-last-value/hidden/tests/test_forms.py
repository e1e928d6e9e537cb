import unittest

from forms import check, choice_rules, length_rules, required


class SeveralFields(unittest.TestCase):
    def test_each_length_has_its_field(self):
        rules = length_rules({"name": 3, "code": 4})
        self.assertEqual(check({"name": "abcd", "code": "abcd"}, rules), ["name: longer than 3"])

    def test_lengths_in_order(self):
        rules = length_rules({"a": 1, "b": 1, "c": 1})
        form = {"a": "xx", "b": "x", "c": "xx"}
        self.assertEqual(check(form, rules), ["a: longer than 1", "c: longer than 1"])

    def test_each_choice_has_its_field(self):
        rules = choice_rules({"size": ["s", "m"], "color": ["red", "blue"]})
        self.assertEqual(check({"size": "xl", "color": "red"}, rules), ["size: not one of s, m"])

    def test_first_choice_field_is_valid(self):
        rules = choice_rules({"size": ["s", "m"], "color": ["red"]})
        self.assertEqual(check({"size": "s", "color": "green"}, rules), ["color: not one of red"])

    def test_rules_do_not_share_state_across_calls(self):
        rules = length_rules({"a": 1, "b": 5}) + length_rules({"c": 2})
        self.assertEqual(check({"a": "12", "c": "123"}, rules), ["a: longer than 1", "c: longer than 2"])


class OneField(unittest.TestCase):
    def test_length(self):
        rules = length_rules({"name": 3})
        self.assertEqual(check({"name": "abc"}, rules), [])
        self.assertEqual(check({"name": "abcd"}, rules), ["name: longer than 3"])

    def test_absent_field_has_no_length(self):
        self.assertEqual(check({}, length_rules({"name": 3})), [])

    def test_choice(self):
        rules = choice_rules({"size": ["s", "m"]})
        self.assertEqual(check({"size": "xl"}, rules), ["size: not one of s, m"])
        self.assertEqual(check({}, rules), [])

    def test_required_rules(self):
        rules = [required(field) for field in ("a", "b")]
        self.assertEqual(check({"a": "1", "b": ""}, rules), ["b: is missing"])
