"""Reminders that survive a restart."""
