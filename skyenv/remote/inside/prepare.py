"""What an init container of a pod runs: the portable directory into a volume, and the network down.

The volume is mounted where the sandbox looks for it. A pod's containers share one network namespace, so what is taken
down here, with a capability that the sandbox does not get, stays down for it, whatever network the cluster has.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import sys

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def take_network_down() -> None:
    """Every interface but loopback. OSError without the capability to do so."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _index, name in socket.if_nameindex():
            request = struct.pack("16sH14x", name.encode(), 0)
            flags = struct.unpack_from("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)[0]
            if name != "lo" and flags & _IFF_UP:
                fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), flags & ~_IFF_UP))


def main() -> None:
    """Entry point: argument 1 is the volume's directory, argument 2 `none` or `cluster`, the network to leave."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    shutil.copytree(home, sys.argv[1], symlinks=True, dirs_exist_ok=True)
    if sys.argv[2] == "none":
        take_network_down()
