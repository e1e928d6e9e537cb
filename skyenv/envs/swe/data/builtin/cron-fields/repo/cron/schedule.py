"""Schedules: minute, hour, day of month, month, day of week (0 is Sunday)."""

from datetime import timedelta

from cron.fields import LIMITS, parse_field


class Schedule:
    def __init__(self, text):
        parts = text.split()
        if len(parts) != 5:
            raise ValueError("expected five fields in %r" % text)
        fields = [parse_field(part, low, high) for part, (_, low, high) in zip(parts, LIMITS)]
        self.minutes, self.hours, self.days, self.months, self.weekdays = fields

    def matches_day(self, day):
        """Return whether it runs on that date."""
        weekday = day.isoweekday() % 7
        return day.month in self.months and day.day in self.days and weekday in self.weekdays

    def matches(self, moment):
        """Return whether it runs in the minute of moment."""
        return moment.minute in self.minutes and moment.hour in self.hours and self.matches_day(moment)

    def next_run(self, now):
        """Return the first minute after now, a datetime, in which it runs, or None if there is none in 8 years."""
        moment = now.replace(second=0, microsecond=0)
        limit = moment + timedelta(days=8 * 366)
        while moment < limit:
            if self.matches(moment):
                return moment
            if self.matches_day(moment):
                moment += timedelta(minutes=1)
            else:
                moment = moment.replace(hour=0, minute=0) + timedelta(days=1)
        return None
