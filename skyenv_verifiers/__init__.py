"""Where verifiers finds the adapter: it looks plugins up by the name of a top-level module, one class of each kind."""

from skyenv.adapters.verifiers import SkyEnv, SkyHarness, SkyTaskset

__all__ = ["SkyEnv", "SkyHarness", "SkyTaskset"]
