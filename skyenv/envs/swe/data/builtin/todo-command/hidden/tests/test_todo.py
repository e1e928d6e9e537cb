import io
import json
import os
import tempfile
import unittest

from todo.command import main


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "todo.json")

    def run_todo(self, *argv, stdin=""):
        out, err = io.StringIO(), io.StringIO()
        code = main(["--file", self.path, *argv], io.StringIO(stdin), out, err)
        return code, out.getvalue(), err.getvalue()

    def add(self, *texts):
        for text in texts:
            self.assertEqual(self.run_todo("add", text)[0], 0)

    def shown(self, *options):
        return json.loads(self.run_todo("list", "--json", *options)[1])


class Scripts(Command):
    def test_json(self):
        self.add("milk", "bread")
        self.assertEqual(self.shown()[1], {"id": 2, "text": "bread", "done": False})

    def test_json_of_nothing(self):
        self.assertEqual(self.run_todo("list", "--json")[:2], (0, "[]\n"))

    def test_done_items_are_shown_with_all(self):
        self.add("milk", "bread", "tea")
        self.assertEqual(self.run_todo("done", "1", "3")[0], 0)
        self.assertEqual(self.run_todo("list")[1], "2. [ ] bread\n")
        self.assertEqual(self.run_todo("list", "--all")[1], "1. [x] milk\n2. [ ] bread\n3. [x] tea\n")

    def test_json_obeys_all(self):
        self.add("milk", "bread")
        self.run_todo("done", "1")
        self.assertEqual([item["id"] for item in self.shown()], [2])
        self.assertEqual([item["done"] for item in self.shown("--all")], [True, False])

    def test_unknown_id_changes_nothing(self):
        self.add("milk")
        code, out, err = self.run_todo("done", "1", "9")
        self.assertEqual((code, out, err.strip()), (1, "", "no such item: 9"))
        self.assertEqual(self.shown()[0]["done"], False)

    def test_remove(self):
        self.add("milk", "bread")
        self.assertEqual(self.run_todo("remove", "1")[0], 0)
        self.assertEqual([item["id"] for item in self.shown()], [2])
        self.assertEqual(self.run_todo("remove", "1")[0], 1)

    def test_ids_are_never_reused(self):
        self.add("milk", "bread")
        self.run_todo("remove", "2")
        self.assertEqual(self.run_todo("add", "tea")[1], "added 3\n")

    def test_add_from_standard_input(self):
        code, out, _ = self.run_todo("add", "-", stdin="milk\n\n bread \n")
        self.assertEqual((code, out), (0, "added 1\nadded 2\n"))
        self.assertEqual([item["text"] for item in self.shown()], ["milk", "bread"])

    def test_wrong_usage(self):
        for argv in ([], ["fly"], ["done"], ["done", "x"], ["list", "extra"]):
            code, out, err = self.run_todo(*argv)
            self.assertEqual((code, out), (2, ""))
            self.assertIn("todo", err)

    def test_old_file(self):
        with open(self.path, "w") as file:
            json.dump({"items": {"10": {"text": "b", "done": True}, "9": {"text": "a", "done": False}}}, file)
        self.assertEqual([item["id"] for item in self.shown("--all")], [9, 10])
        self.assertEqual(self.run_todo("add", "c")[1], "added 11\n")


class Kept(Command):
    def test_add_and_list(self):
        self.add("milk", "bread")
        self.assertEqual(self.run_todo("list"), (0, "1. [ ] milk\n2. [ ] bread\n", ""))

    def test_empty(self):
        self.assertEqual(self.run_todo("list"), (0, "", ""))

    def test_old_open_items(self):
        with open(self.path, "w") as file:
            json.dump({"items": {"4": {"text": "\u00fc", "done": False}}}, file)
        self.assertEqual(self.run_todo("list")[1], "4. [ ] \u00fc\n")
