import unittest

import units


class Temperature(unittest.TestCase):
    def test_freezing(self):
        self.assertEqual(units.to_fahrenheit(0), 32)

    def test_boiling(self):
        self.assertEqual(units.to_fahrenheit(100), 212)

    def test_same_on_both_scales(self):
        self.assertEqual(units.to_fahrenheit(-40), -40)

    def test_round_trip(self):
        self.assertAlmostEqual(units.to_celsius(units.to_fahrenheit(36.6)), 36.6)

    def test_to_celsius(self):
        self.assertEqual(units.to_celsius(212), 100)

    def test_to_kelvin(self):
        self.assertAlmostEqual(units.to_kelvin(0), 273.15)
