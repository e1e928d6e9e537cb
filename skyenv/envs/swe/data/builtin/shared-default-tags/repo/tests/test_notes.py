import unittest

from notes import Note


class NoteTest(unittest.TestCase):
    def test_add_tag(self):
        self.assertEqual(Note("a", ["x"]).add_tag("y").tags, ["x", "y"])


if __name__ == "__main__":
    unittest.main()
