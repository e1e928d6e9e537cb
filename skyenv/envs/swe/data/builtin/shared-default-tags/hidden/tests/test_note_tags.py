import unittest

from notes import Note, by_tag


class Sharing(unittest.TestCase):
    def test_fresh_note_has_no_tags(self):
        Note("a").add_tag("urgent")
        self.assertEqual(Note("b").tags, [])

    def test_callers_list_is_left_alone(self):
        tags = ["home"]
        Note("a", tags).add_tag("urgent")
        self.assertEqual(tags, ["home"])

    def test_two_notes_from_one_list(self):
        tags = ["home"]
        first, second = Note("a", tags), Note("b", tags)
        first.add_tag("urgent")
        self.assertEqual(second.tags, ["home"])

    def test_copy_is_independent(self):
        first = Note("a", ["home"])
        first.copy("b").add_tag("urgent")
        self.assertEqual(first.tags, ["home"])

    def test_any_iterable(self):
        self.assertEqual(Note("a", ("x", "y")).add_tag("z").tags, ["x", "y", "z"])


class Kept(unittest.TestCase):
    def test_tag_is_added_once(self):
        self.assertEqual(Note("a", []).add_tag("x").add_tag("x").tags, ["x"])

    def test_copy_has_the_tags(self):
        note = Note("a", ["x"]).copy("b")
        self.assertEqual((note.text, note.tags), ("b", ["x"]))

    def test_by_tag(self):
        notes = [Note("a", ["x"]), Note("b", ["y"]), Note("c", ["y", "x"])]
        self.assertEqual([note.text for note in by_tag(notes, "x")], ["a", "c"])
