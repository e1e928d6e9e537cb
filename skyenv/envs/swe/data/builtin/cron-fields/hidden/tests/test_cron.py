import unittest
from datetime import datetime

from cron import Schedule
from cron.fields import parse_field

NOW = datetime(2024, 5, 1, 12, 0)  # a Wednesday


class Fields(unittest.TestCase):
    def test_range(self):
        self.assertEqual(parse_field("1-5", 0, 59), {1, 2, 3, 4, 5})

    def test_list(self):
        self.assertEqual(parse_field("0,15,30", 0, 59), {0, 15, 30})

    def test_steps(self):
        self.assertEqual(parse_field("*/20", 0, 59), {0, 20, 40})
        self.assertEqual(parse_field("*/5", 1, 12), {1, 6, 11})
        self.assertEqual(parse_field("8-18/4", 0, 23), {8, 12, 16})

    def test_mix(self):
        self.assertEqual(parse_field("0-10/5,30,58-59", 0, 59), {0, 5, 10, 30, 58, 59})

    def test_errors_name_the_field(self):
        for text in ("5-1", "0-99", "1,,2", "*/0", "a", "1-", "-3", "1/2/3", "*-5", "+1", "jan"):
            with self.assertRaises(ValueError) as caught:
                parse_field(text, 0, 59)
            self.assertIn(text, str(caught.exception))

    def test_single(self):
        self.assertEqual((parse_field("7", 0, 59), parse_field("*", 1, 3)), ({7}, {1, 2, 3}))

    def test_out_of_range(self):
        for text in ("60", "13x", ""):
            with self.assertRaises(ValueError):
                parse_field(text, 0, 59)


class Names(unittest.TestCase):
    def test_months(self):
        self.assertEqual(Schedule("0 0 1 feb,NOV *").months, {2, 11})

    def test_weekday_range(self):
        self.assertEqual(Schedule("0 9 * * Mon-Fri").weekdays, {1, 2, 3, 4, 5})

    def test_sunday_is_also_seven(self):
        self.assertEqual(Schedule("0 0 * * 7").weekdays, {0})
        self.assertEqual(Schedule("0 0 * * 5-7").weekdays, {0, 5, 6})

    def test_names_only_where_they_belong(self):
        for text in ("jan 0 * * *", "0 0 * mon *", "0 0 * * feb"):
            with self.assertRaises(ValueError):
                Schedule(text)


class NextRun(unittest.TestCase):
    def test_strictly_after(self):
        self.assertEqual(Schedule("0 12 * * *").next_run(NOW), datetime(2024, 5, 2, 12, 0))
        self.assertEqual(Schedule("* * * * *").next_run(NOW.replace(second=30)), datetime(2024, 5, 1, 12, 1))

    def test_working_days(self):
        friday = datetime(2024, 5, 3, 18, 0)
        self.assertEqual(Schedule("*/30 8-17 * * mon-fri").next_run(friday), datetime(2024, 5, 6, 8, 0))

    def test_either_day(self):
        schedule = Schedule("0 0 13 * fri")
        runs = [NOW]
        for _ in range(4):
            runs.append(schedule.next_run(runs[-1]))
        self.assertEqual([run.day for run in runs[1:]], [3, 10, 13, 17])

    def test_one_restricted_day(self):
        self.assertEqual(Schedule("0 0 * * sat").next_run(NOW), datetime(2024, 5, 4))
        self.assertEqual(Schedule("0 0 20 * *").next_run(NOW), datetime(2024, 5, 20))

    def test_leap_day(self):
        self.assertEqual(Schedule("5 4 29 2 *").next_run(NOW), datetime(2028, 2, 29, 4, 5))

    def test_never(self):
        self.assertIsNone(Schedule("0 0 30 2 *").next_run(NOW))

    def test_matches(self):
        schedule = Schedule("0 12 * * *")
        self.assertTrue(schedule.matches(NOW))
        self.assertFalse(schedule.matches(NOW.replace(minute=1)))

    def test_number_of_fields(self):
        for text in ("* * * *", "* * * * * *", ""):
            with self.assertRaises(ValueError):
                Schedule(text)
