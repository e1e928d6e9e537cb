import io
import os
import tempfile
import unittest

from todo.command import main


class Add(unittest.TestCase):
    def test_add(self):
        with tempfile.TemporaryDirectory() as folder:
            out = io.StringIO()
            main(["--file", os.path.join(folder, "t.json"), "add", "milk"], stdout=out)
            self.assertEqual(out.getvalue(), "added 1\n")
