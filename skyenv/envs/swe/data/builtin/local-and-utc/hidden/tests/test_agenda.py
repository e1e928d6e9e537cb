import unittest
from datetime import datetime, timedelta, timezone

from reminders.agenda import Agenda
from reminders.store import dump, load

UTC = timezone.utc
EAST = timezone(timedelta(hours=2))
WEST = timezone(timedelta(hours=-3, minutes=-30))


def at(hour, zone=UTC, minute=0):
    return datetime(2024, 5, 1, hour, minute, tzinfo=zone)


class Restart(unittest.TestCase):
    def test_offset_survives(self):
        agenda = Agenda()
        agenda.add(at(9, EAST), "call")
        again = Agenda(agenda.save())
        self.assertEqual(again.due(at(6, minute=59)), [])
        self.assertEqual(again.due(at(7)), ["call"])

    def test_west_of_utc(self):
        (when, message), = load(dump([(at(9, WEST), "call")]))
        self.assertEqual((when, message), (at(12, UTC, 30), "call"))

    def test_old_file_is_utc(self):
        self.assertEqual(load("2024-05-01 09:00\tcall\n"), [(at(9), "call")])

    def test_old_and_new_together(self):
        agenda = Agenda("2024-05-01 09:00\told\n")
        agenda.add(at(10, EAST), "new")
        self.assertEqual(agenda.due(at(9)), ["new", "old"])

    def test_second_save_is_stable(self):
        agenda = Agenda()
        agenda.add(at(9, EAST), "call")
        text = agenda.save()
        self.assertEqual(load(Agenda(text).save()), load(text))

    def test_snoozed_old_reminder(self):
        agenda = Agenda("2024-05-01 09:00\tcall\n")
        agenda.snooze("call", 30)
        self.assertEqual(Agenda(agenda.save()).due(at(9, minute=30)), ["call"])


class Kept(unittest.TestCase):
    def test_due_in_order_and_once(self):
        agenda = Agenda()
        agenda.add(at(9), "b")
        agenda.add(at(8), "a")
        agenda.add(at(11), "c")
        self.assertEqual((agenda.due(at(10)), agenda.due(at(10))), (["a", "b"], []))

    def test_naive_time_is_refused(self):
        with self.assertRaises(ValueError):
            Agenda().add(datetime(2024, 5, 1), "x")

    def test_snooze(self):
        agenda = Agenda()
        agenda.add(at(8), "a")
        agenda.snooze("a", 90)
        self.assertEqual((agenda.due(at(9)), agenda.due(at(10))), ([], ["a"]))

    def test_empty(self):
        self.assertEqual((Agenda().save(), load("")), ("", []))

    def test_message_with_tab(self):
        self.assertEqual([m for _, m in load("2024-05-01 09:00\ta\tb")], ["a\tb"])
