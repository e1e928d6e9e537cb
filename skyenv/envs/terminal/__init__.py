"""`SkyRL/Terminal-v0`: a task on a machine, judged by what the machine is left like; see `env`."""
