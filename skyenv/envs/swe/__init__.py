"""Repository repair: tasks, their sources, and hidden tests that grade a patch."""
