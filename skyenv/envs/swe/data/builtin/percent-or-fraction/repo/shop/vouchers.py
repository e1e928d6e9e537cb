"""Vouchers, as the office enters them: a code and a whole number of percent."""


class Voucher:
    def __init__(self, code, percent):
        if not 0 < percent <= 100:
            raise ValueError("percent must be above 0 and at most 100")
        self.code = code
        self.percent = percent

    def label(self):
        """Return the line printed on the bill."""
        return "%s: %d%% off" % (self.code, self.percent)


class VoucherBook:
    """The vouchers that are valid now."""

    def __init__(self, vouchers=()):
        self._vouchers = {voucher.code.upper(): voucher for voucher in vouchers}

    def find(self, code):
        """Return the voucher with code, in any case, or None."""
        return self._vouchers.get(code.strip().upper()) if code else None

    def discount(self, code):
        """Return the discount for code, 0 for an unknown one."""
        voucher = self.find(code)
        return voucher.percent if voucher else 0
