"""The code on the sandbox's side of the wall: standard library only, single-threaded, started as a script.

`launcher` is one process per node server; it forks a child for each sandbox, `enter` takes that child into its
namespaces, and `init` is what the child becomes: the sandbox's process 1, which holds the shell and touches the files.
Nothing here may import the rest of skyenv: it runs with `python -I -S` and must stay small, because each sandbox
carries a copy-on-write image of it. For the same reason pathlib and dataclasses stay unloaded.
"""
