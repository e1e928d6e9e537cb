import unittest
from datetime import datetime

from cron import Schedule


class Simple(unittest.TestCase):
    def test_daily(self):
        self.assertEqual(Schedule("30 6 * * *").next_run(datetime(2024, 5, 1)), datetime(2024, 5, 1, 6, 30))
