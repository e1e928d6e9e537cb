import unittest

from web.router import Router


class Routes(unittest.TestCase):
    def test_static(self):
        router = Router()
        router.add("about", "/about")
        self.assertEqual(router.match("/about"), ("about", {}))
