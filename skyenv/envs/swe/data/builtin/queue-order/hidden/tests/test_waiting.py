import unittest

from waiting import Queue


def filled(*guests):
    queue = Queue()
    for guest in guests:
        queue.join(guest)
    return queue


class Take(unittest.TestCase):
    def test_order(self):
        queue = filled("ann", "bob", "cid")
        self.assertEqual([queue.take() for _ in range(3)], ["ann", "bob", "cid"])

    def test_late_guest(self):
        queue = filled("ann", "bob")
        first = queue.take()
        queue.join("cid")
        self.assertEqual([first, queue.take(), queue.take()], ["ann", "bob", "cid"])

    def test_one(self):
        self.assertEqual(filled("ann").take(), "ann")

    def test_length(self):
        queue = filled("ann", "bob")
        queue.take()
        self.assertEqual(len(queue), 1)

    def test_empty(self):
        with self.assertRaises(IndexError):
            Queue().take()
