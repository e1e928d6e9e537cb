import unittest

import bus as package
from bus import Bus


class Recorder(unittest.TestCase):
    def setUp(self):
        self.bus = Bus()
        self.seen = []

    def note(self, label, result=None):
        def listener(*args):
            self.seen.append(label)
            return result

        return listener


class Order(Recorder):
    def test_priority(self):
        for label, priority in (("low", -1), ("a", 0), ("high", 5), ("b", 0)):
            self.bus.on("x", self.note(label), priority=priority)
        self.bus.emit("x")
        self.assertEqual(self.seen, ["high", "a", "b", "low"])

    def test_priority_across_patterns(self):
        self.bus.on("x.*", self.note("star"))
        self.bus.on("x.y", self.note("exact"), priority=1)
        self.bus.on("**", self.note("all"))
        self.assertEqual((self.bus.emit("x.y"), self.seen), (3, ["exact", "star", "all"]))

    def test_stop(self):
        self.bus.on("x", self.note("a"))
        self.bus.on("x", self.note("b", package.STOP))
        self.bus.on("x", self.note("c"))
        self.assertEqual((self.bus.emit("x"), self.seen), (2, ["a", "b"]))


class Removal(Recorder):
    def test_function_removes_one_registration(self):
        listener = self.note("a")
        first = self.bus.on("x", listener)
        self.bus.on("x", listener)
        first()
        first()
        self.assertEqual((self.bus.emit("x"), self.seen), (1, ["a"]))

    def test_once(self):
        self.bus.once("x", self.note("a"))
        self.assertEqual((self.bus.emit("x"), self.bus.emit("x"), self.seen), (1, 0, ["a"]))

    def test_once_is_removed_before_the_call(self):
        def again():
            self.seen.append("a")
            if len(self.seen) < 3:
                self.bus.emit("x")

        self.bus.once("x", again)
        self.bus.emit("x")
        self.assertEqual(self.seen, ["a"])

    def test_once_taken_back(self):
        self.bus.once("x", self.note("a"))()
        self.assertEqual(self.bus.emit("x"), 0)

    def test_off_finds_once(self):
        listener = self.note("a")
        self.bus.once("x", listener)
        self.bus.off("x", listener)
        self.assertEqual(self.bus.emit("x"), 0)


class Patterns(Recorder):
    def matching(self, pattern, *names):
        self.bus.on(pattern, self.note("a"))
        return [name for name in names if self.bus.emit(name)]

    def test_star(self):
        names = self.matching("file.*", "file", "file.a", "file.a.b", "files.a")
        self.assertEqual(names, ["file.a"])

    def test_star_in_the_middle(self):
        names = self.matching("a.*.c", "a.b.c", "a.c", "a.b.b.c", "a.b.d")
        self.assertEqual(names, ["a.b.c"])

    def test_two_stars(self):
        names = self.matching("file.**", "file", "file.a", "file.a.b", "files")
        self.assertEqual(names, ["file", "file.a", "file.a.b"])

    def test_everything(self):
        self.assertEqual(self.matching("**", "a", "a.b.c"), ["a", "a.b.c"])

    def test_other_signs_mean_themselves(self):
        self.assertEqual(self.matching("a[b].c?", "a[b].c?", "ab.c", "a[b].cx"), ["a[b].c?"])


class Changes(Recorder):
    def test_added_while_sending(self):
        self.bus.on("x", lambda: self.bus.on("x", self.note("late")))
        self.assertEqual((self.bus.emit("x"), self.seen), (1, []))

    def test_removed_while_sending(self):
        self.bus.on("x", lambda: remove(), priority=1)
        remove = self.bus.on("x", self.note("a"))
        self.bus.on("x", self.note("b"))
        self.assertEqual((self.bus.emit("x"), self.seen), (2, ["b"]))

    def test_errors_do_not_stop_the_others(self):
        def fail(text):
            def listener():
                raise RuntimeError(text)

            return listener

        for listener in (fail("one"), self.note("a"), fail("two"), self.note("b")):
            self.bus.on("x", listener)
        with self.assertRaisesRegex(RuntimeError, "one"):
            self.bus.emit("x")
        self.assertEqual(self.seen, ["a", "b"])


class Kept(Recorder):
    def test_arguments(self):
        self.bus.on("x", lambda *args: self.seen.append(args))
        self.bus.emit("x", 1, 2)
        self.assertEqual(self.seen, [(1, 2)])

    def test_other_names(self):
        self.bus.on("x", self.note("a"))
        self.bus.emit("y")
        self.bus.emit("x.y")
        self.assertEqual(self.seen, [])

    def test_off(self):
        listener = self.note("a")
        self.bus.on("x", listener)
        self.bus.on("x", self.note("b"))
        self.bus.off("x", listener)
        self.bus.emit("x")
        self.assertEqual(self.seen, ["b"])

    def test_off_of_nothing(self):
        with self.assertRaises(ValueError):
            self.bus.off("x", print)
