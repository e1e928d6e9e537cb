import unittest

from bus import Bus


class Basic(unittest.TestCase):
    def test_emit(self):
        seen = []
        bus = Bus()
        bus.on("a", seen.append)
        bus.emit("a", 1)
        self.assertEqual(seen, [1])
