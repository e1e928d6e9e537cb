"""Schedules in five fields."""

from cron.schedule import Schedule

__all__ = ["Schedule"]
