import itertools
import unittest

from rows import join_row, split_row


class Quoted(unittest.TestCase):
    def test_reported(self):
        self.assertEqual(split_row('1,"say ""hi"", please",2'), ["1", 'say "hi", please', "2"])

    def test_comma(self):
        self.assertEqual(split_row('"a,b",c'), ["a,b", "c"])

    def test_quotes_at_the_edges(self):
        self.assertEqual(split_row('"""a""",""""'), ['"a"', '"'])

    def test_only_commas(self):
        self.assertEqual(split_row('",,",","'), [",,", ","])

    def test_round_trip(self):
        for cells in itertools.product(["", "a", ",", '"', 'x","y', '""'], repeat=2):
            self.assertEqual(split_row(join_row(cells)), list(cells))


class Kept(unittest.TestCase):
    def test_quoted_without_need(self):
        self.assertEqual(split_row('"a","b"'), ["a", "b"])

    def test_empty_cells(self):
        self.assertEqual(split_row(",a,"), ["", "a", ""])
        self.assertEqual(split_row('"",b'), ["", "b"])
        self.assertEqual(split_row(""), [""])

    def test_blanks(self):
        self.assertEqual(split_row(" a , b "), [" a ", " b "])

    def test_quote_inside_a_bare_cell(self):
        self.assertEqual(split_row('6" nail,x'), ['6" nail', "x"])

    def test_join(self):
        self.assertEqual(join_row(["a,b", 'c"d', "e"]), '"a,b","c""d",e')
