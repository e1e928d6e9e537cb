"""The commands of `skyenv`, one module a verb; `skyenv.cli` wires them."""
