"""The command line."""

import argparse
import sys

from todo.store import Store


def make_parser():
    parser = argparse.ArgumentParser(prog="todo")
    parser.add_argument("--file", default="todo.json")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add")
    add.add_argument("text")
    commands.add_parser("list")
    return parser


def main(argv=None, stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr):
    """Run one command."""
    arguments = make_parser().parse_args(argv)
    store = Store(arguments.file)
    if arguments.command == "add":
        print("added %d" % store.add(arguments.text), file=stdout)
        store.save()
    else:
        for key, item in store.items.items():
            print("%d. [%s] %s" % (key, "x" if item["done"] else " ", item["text"]), file=stdout)
    return 0
