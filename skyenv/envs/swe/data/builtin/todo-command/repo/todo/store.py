"""The list as a JSON file."""

import json
import os


class Store:
    """Items by id, kept in a file. Each item is a dict with text and done."""

    def __init__(self, path):
        self.path = path
        self.items = {}
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
            self.items = {int(key): item for key, item in data["items"].items()}

    def add(self, text):
        """Add an open item and return its id."""
        key = max(self.items, default=0) + 1
        self.items[key] = {"text": text, "done": False}
        return key

    def save(self):
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump({"items": self.items}, file)
