"""GRPO on TRL over skyenv's rollouts. Importing the package loads no torch; trl is imported in `grpo` alone."""
