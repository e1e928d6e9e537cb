"""Sections of a run's configuration that one part of the trainer reads; `sky_trainer.config` puts them together."""
