"""Node servers as processes of their own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

# Arguments: the backend and, if wanted, a state directory and a port.
SERVE = """
import sys
from pathlib import Path
from skyenv.remote.listen import Listening
from skyenv.remote.serve import ServeOptions, serve
TUNNELS = ("127.0.0.1:*",)
backend, state, port = [*sys.argv[1:], *("", "", "0")[len(sys.argv) - 1:]]
state = Path(state) if state else None
options = ServeOptions(Listening(port=int(port)), token="secret", backend=backend, state=state, tunnels=TUNNELS)
serve(options, on_ready=lambda url: print(url, flush=True))
"""
# Arguments: a state directory, and for how long its sandboxes wait for another server.
SERVE_PATIENT = """
import socket, sys, uvicorn
from pathlib import Path
from skyenv.remote.backends.launching import Home
from skyenv.remote.backends.local import LocalBackend
from skyenv.remote.node import create_app
listener = socket.create_server(("127.0.0.1", 0))
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
backend = LocalBackend(home=Home(Path(sys.argv[1]), float(sys.argv[2])))
config = uvicorn.Config(create_app(backend, token="secret"), log_config=None)
uvicorn.Server(config).run([listener])
"""
# The launcher gives up root for the user nobody, so everything after that happens as on a machine without sudo.
SERVE_ROOTLESS = """
import socket, sys, uvicorn
from skyenv.remote.backends.local import LocalBackend
from skyenv.remote.node import create_app
listener = socket.create_server(("127.0.0.1", 0))
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
app = create_app(LocalBackend(run_as=65534), token="secret", tunnels=["127.0.0.1:*"])
config = uvicorn.Config(app, log_config=None)
uvicorn.Server(config).run([listener])
"""
# Arguments: the image for requests without one and, if wanted, a state directory.
SERVE_DOCKER = """
import socket, sys, uvicorn
from pathlib import Path
from skyenv.remote.backends import get
from skyenv.remote.node import create_app
listener = socket.create_server(("127.0.0.1", 0))
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
backend = get("docker", image=sys.argv[1], state=Path(sys.argv[2]) if len(sys.argv) > 2 else None)
config = uvicorn.Config(create_app(backend, token="secret", tunnels=["127.0.0.1:*"]), log_config=None)
uvicorn.Server(config).run([listener])
"""

# Arguments: the options of `OciBackend` and of its images as one JSON object; paths are strings.
SERVE_OCI = """
import json, socket, sys, uvicorn
from pathlib import Path
from skyenv.remote.backends.launching import Home
from skyenv.remote.backends.oci import OciBackend
from skyenv.remote.images.settings import ImageSettings
from skyenv.remote.node import create_app
given = json.loads(sys.argv[1])
settings = ImageSettings(root=Path(given["root"]), paths=tuple(map(Path, given["paths"])), attempts=2)
home = Home(Path(given["state"])) if given.get("state") else None
backend = OciBackend(given.get("image"), given.get("runtime"), settings, run_as=given.get("run_as"), home=home)
listener = socket.create_server(("127.0.0.1", given.get("port", 0)))
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
config = uvicorn.Config(create_app(backend, token="secret", tunnels=["127.0.0.1:*"]), log_config=None)
uvicorn.Server(config).run([listener])
"""


@contextlib.contextmanager
def served(code: str, *arguments: str, below: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node server as a process of its own, and its URL; interrupted at the end. `below` is a command to run it by."""
    command = [*below, sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), f"the server ended with status {process.wait()}"
        yield process, url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
        process.stdout.close()
