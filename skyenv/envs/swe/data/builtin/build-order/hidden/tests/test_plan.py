import unittest

from planner.graph import topological
from planner.parse import BuildError, parse
from planner.plan import plan

FILE = "app: lib assets\nlib: core\nassets:\ncore:\n"


class Order(unittest.TestCase):
    def test_needs_come_first(self):
        self.assertEqual(plan(FILE), ["core", "lib", "assets", "app"])

    def test_goal(self):
        self.assertEqual(plan(FILE, ["lib"]), ["core", "lib"])

    def test_diamond(self):
        order = plan("a: b c\nb: d\nc: d\nd:")
        self.assertEqual(order, ["d", "b", "c", "a"])

    def test_cycle_is_named(self):
        with self.assertRaises(BuildError) as caught:
            plan("x: a\na: b\nb: c\nc: a")
        self.assertEqual(str(caught.exception), "cycle: a -> b -> c -> a")

    def test_self_cycle(self):
        with self.assertRaises(ValueError) as caught:
            topological({"a": ["a"]})
        self.assertEqual(caught.exception.args[0], ["a", "a"])

    def test_undefined_need(self):
        with self.assertRaises(BuildError) as caught:
            plan("a: b\nb: ghost")
        self.assertEqual(str(caught.exception), "unknown target: ghost")

    def test_long_chain(self):
        text = "\n".join("t%d: t%d" % (i, i + 1) for i in range(300)) + "\nt300:"
        self.assertEqual(plan(text)[0], "t300")


class Kept(unittest.TestCase):
    def test_independent_targets_keep_the_order_of_the_file(self):
        self.assertEqual(plan("c:\na:\nb:"), ["c", "a", "b"])

    def test_file_already_in_order(self):
        self.assertEqual(sorted(plan("core:\nlib: core\n")), ["core", "lib"])

    def test_unknown_goal(self):
        with self.assertRaises(BuildError) as caught:
            plan("a:", ["b"])
        self.assertEqual(str(caught.exception), "unknown target: b")

    def test_empty(self):
        self.assertEqual(plan("# nothing\n\n"), [])

    def test_parse_errors(self):
        for text, line in (("a\n", "line 1"), ("a:\na: b", "line 2"), (": a", "line 1")):
            with self.assertRaisesRegex(BuildError, line):
                parse(text)

    def test_parse(self):
        self.assertEqual(parse("a: b  c # both\nb:"), {"a": ["b", "c"], "b": []})
