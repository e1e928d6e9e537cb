import unittest

from editor import Buffer


def typed(buffer, text):
    for letter in text:
        buffer.type(letter)
    return buffer


def history(buffer):
    texts = []
    while buffer.undo():
        texts.append(buffer.text)
    return texts


class Undo(unittest.TestCase):
    def test_words(self):
        self.assertEqual(history(typed(Buffer(), "one two\nx")), ["one two\n", "one ", ""])

    def test_nothing_to_do(self):
        buffer = Buffer("a")
        self.assertEqual((buffer.undo(), buffer.redo(), buffer.text), (False, False, "a"))

    def test_cursor_comes_back(self):
        buffer = Buffer("abc")
        buffer.move(1)
        buffer.type("x")
        buffer.move(4)
        buffer.undo()
        self.assertEqual((buffer.text, buffer.cursor), ("abc", 1))
        buffer.redo()
        self.assertEqual(buffer.text, "axbc")

    def test_moving_ends_a_run(self):
        buffer = typed(Buffer(), "ab")
        buffer.move(2)
        typed(buffer, "cd")
        self.assertEqual(history(buffer), ["ab", ""])

    def test_deletions_together(self):
        buffer = typed(Buffer(), "abc")
        buffer.backspace()
        buffer.backspace()
        typed(buffer, "x")
        self.assertEqual(history(buffer), ["a", "abc", ""])

    def test_undo_ends_a_run(self):
        buffer = typed(Buffer(), "a b")
        buffer.undo()
        typed(buffer, "c")
        self.assertEqual(history(buffer), ["a ", ""])

    def test_replace_all_is_a_step(self):
        buffer = typed(Buffer(), "aba")
        buffer.replace_all("a", "xy")
        self.assertEqual(history(buffer), ["aba", ""])

    def test_no_steps(self):
        buffer = Buffer("abc")
        buffer.move(0)
        buffer.backspace()
        buffer.type("")
        buffer.replace_all("z", "y")
        self.assertFalse(buffer.undo())


class Redo(unittest.TestCase):
    def test_all_the_way(self):
        buffer = typed(Buffer(), "a b c")
        steps = len(history(buffer))
        self.assertEqual([buffer.redo() for _ in range(steps + 1)], [True] * steps + [False])
        self.assertEqual(buffer.text, "a b c")

    def test_forgotten_after_a_change(self):
        buffer = typed(Buffer(), "a b")
        buffer.undo()
        buffer.type("x")
        self.assertFalse(buffer.redo())
        self.assertEqual(buffer.text, "a x")

    def test_moving_forgets_nothing(self):
        buffer = typed(Buffer(), "a b")
        buffer.undo()
        buffer.move(0)
        self.assertTrue(buffer.redo())
        self.assertEqual(buffer.text, "a b")


class Groups(unittest.TestCase):
    def test_one_step(self):
        buffer = Buffer("x")
        with buffer.group():
            typed(buffer, "one two")
            with buffer.group():
                buffer.backspace(3)
            buffer.replace_all("x", "y")
        self.assertEqual(buffer.text, "yone ")
        self.assertEqual(history(buffer), ["x"])

    def test_empty(self):
        buffer = typed(Buffer(), "a")
        with buffer.group():
            buffer.move(0)
        self.assertEqual(history(buffer), [""])

    def test_typing_after_a_group_is_separate(self):
        buffer = Buffer()
        with buffer.group():
            typed(buffer, "ab")
        typed(buffer, "c")
        self.assertEqual(history(buffer), ["ab", ""])

    def test_error_takes_changes_back(self):
        buffer = typed(Buffer(), "ab")
        with self.assertRaises(KeyError):
            with buffer.group():
                buffer.type("c")
                raise KeyError
        self.assertEqual((buffer.text, buffer.cursor, buffer.redo()), ("ab", 2, False))
        self.assertEqual(history(buffer), [""])


class Limit(unittest.TestCase):
    def test_oldest_steps_are_forgotten(self):
        buffer = typed(Buffer(limit=2), "a b c d")
        self.assertEqual(history(buffer), ["a b c ", "a b "])


class Kept(unittest.TestCase):
    def test_typing_and_deleting(self):
        buffer = Buffer("ad")
        buffer.move(1)
        buffer.type("bc")
        buffer.move(99)
        buffer.backspace(2)
        self.assertEqual((buffer.text, buffer.cursor), ("ab", 2))

    def test_move_stays_inside(self):
        buffer = Buffer("abc")
        buffer.move(-5)
        self.assertEqual(buffer.cursor, 0)

    def test_replace_all(self):
        buffer = Buffer("aXbX")
        self.assertEqual((buffer.replace_all("X", ""), buffer.text, buffer.cursor), (2, "ab", 2))
        self.assertEqual((buffer.replace_all("", "y"), buffer.text), (0, "ab"))
