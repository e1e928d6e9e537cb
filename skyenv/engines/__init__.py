"""Inference engines: each file implements `skyenv.core.Engine`."""
