import unittest

from forms import check, required


class Required(unittest.TestCase):
    def test_missing(self):
        self.assertEqual(check({}, [required("name")]), ["name: is missing"])
