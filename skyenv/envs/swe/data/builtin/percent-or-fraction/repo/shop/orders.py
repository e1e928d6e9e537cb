"""Orders."""

from shop.pricing import best, discounted


class Order:
    """Lines of (name, cents, count), an optional voucher code and an optional sale (a fraction off everything)."""

    def __init__(self, book, code=None, sale=0, member=False):
        self.book = book
        self.code = code
        self.sale = sale
        self.member = member
        self.lines = []

    def add(self, name, cents, count=1):
        self.lines.append((name, cents, count))
        return self

    def gross(self):
        """Return the price without discounts."""
        return sum(cents * count for _, cents, count in self.lines)

    def total(self):
        """Return what is to be paid: members get the better discount, others the voucher and else the sale."""
        voucher = self.book.discount(self.code)
        fraction = best(voucher, self.sale) if self.member else voucher or self.sale
        return discounted(self.gross(), fraction)

    def receipt(self):
        """Return the lines of the bill."""
        rows = ["%dx %s" % (count, name) for name, _, count in self.lines]
        if self.book.find(self.code):
            rows.append(self.book.find(self.code).label())
        return rows + ["total %.2f" % (self.total() / 100)]
