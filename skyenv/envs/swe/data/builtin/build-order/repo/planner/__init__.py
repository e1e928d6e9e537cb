"""A tiny build planner."""
