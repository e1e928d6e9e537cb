"""Tasks made from code that passes its own tests: injected bugs, commits of a repository, pairs of releases.

Nothing here decides by itself that a task is good: candidates are run, and what is written has passed admission.
"""
