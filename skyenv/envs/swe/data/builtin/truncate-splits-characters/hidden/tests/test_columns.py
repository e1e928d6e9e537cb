import unittest

from columns import fits, shorten, size


class Multibyte(unittest.TestCase):
    def test_half_a_character_is_dropped(self):
        self.assertEqual(shorten("na\u00efve", 3), "na")

    def test_characters_are_not_bytes(self):
        self.assertEqual(shorten("\u00fc\u00fc\u00fc\u00fc", 5), "\u00fc...")

    def test_four_byte_characters(self):
        text = "\U0001f600\U0001f601\U0001f602"
        self.assertEqual(shorten(text, 8), "\U0001f600...")
        self.assertEqual(shorten(text, 12), text)

    def test_limit_holds_for_every_limit(self):
        text = "a\u00e9\u4e16\U0001f30d" * 4
        sizes = [size(shorten(text, limit)) - limit for limit in range(size(text) + 2)]
        self.assertLessEqual(max(sizes), 0)

    def test_result_is_a_prefix(self):
        text = "\u4e16\u754c\u548c\u5e73"
        for limit in range(12):
            cut = shorten(text, limit)
            self.assertTrue(text.startswith(cut[:-3] if cut.endswith("...") else cut))


class Ascii(unittest.TestCase):
    def test_short_text(self):
        self.assertEqual(shorten("abc", 3), "abc")

    def test_ellipsis(self):
        self.assertEqual(shorten("abcdefgh", 6), "abc...")

    def test_no_room_for_the_ellipsis(self):
        self.assertEqual(shorten("abcdefgh", 3), "abc")
        self.assertEqual(shorten("abcdefgh", 0), "")

    def test_fits(self):
        self.assertEqual((fits("\u00fc", 1), fits("\u00fc", 2)), (False, True))
