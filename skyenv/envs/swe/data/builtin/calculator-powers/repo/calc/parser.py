"""Evaluation by recursive descent."""

from calc.tokens import tokens


def evaluate(text):
    """Return the value of the expression in text. Raises SyntaxError, and ZeroDivisionError for x/0."""
    parser = _Parser(tokens(text))
    return parser.sum()


class _Parser:
    def __init__(self, items):
        self.items = items
        self.position = 0

    def peek(self):
        return self.items[self.position] if self.position < len(self.items) else ("end", "")

    def take(self):
        item = self.peek()
        self.position += 1
        return item

    def sum(self):
        value = self.product()
        while self.peek()[1] in ("+", "-"):
            sign = self.take()[1]
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self):
        value = self.atom()
        while self.peek()[1] in ("*", "/"):
            sign = self.take()[1]
            value = value * self.atom() if sign == "*" else value / self.atom()
        return value

    def atom(self):
        kind, text = self.take()
        if kind == "number":
            return float(text) if "." in text else int(text)
        if text == "(":
            value = self.sum()
            if self.take()[1] != ")":
                raise SyntaxError("missing )")
            return value
        raise SyntaxError("unexpected %r" % (text or "end"))
