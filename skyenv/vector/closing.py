"""Closing an environment, whoever held it and whatever happened to them."""

from __future__ import annotations

import anyio

from skyenv.core import Env
from skyenv.errors import EnvError, SkyEnvError, boundary


async def close(env: Env, timeout: float) -> SkyEnvError | None:
    """Close it within `timeout` seconds, even while the caller is being cancelled; what went wrong, if anything."""
    try:
        with anyio.CancelScope(shield=True), boundary(EnvError, "env.aclose"), anyio.fail_after(timeout):
            await env.aclose()
    except SkyEnvError as error:
        return error
    return None
