"""Tests of environments, tasks and grading."""
