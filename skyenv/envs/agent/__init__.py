"""`SkyRL/Agent-v0`: any agent program as a policy; see `env`."""
