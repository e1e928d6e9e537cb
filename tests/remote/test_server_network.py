"""Sandboxes have no network unless the node was started with it and the client asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_processes import Fleet, fleet_in

from skyenv.errors import ConfigError
from skyenv.remote.client import connect

REACH = "import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('reached')"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("egress")
    with fleet_in(folder) as fleet:
        fleet.start("node", "serve", "--port", "0", "--token", "secret", "--allow-egress")
        yield fleet


async def test_a_node_gives_no_network_unless_it_was_told_to() -> None:
    async with connect() as client:
        with pytest.raises(ConfigError, match="--allow-egress"):
            async with client.sandbox(network="host"):
                pass


async def test_a_network_is_asked_for_by_each_sandbox(node: Fleet) -> None:
    url = node.urls["node"]
    reach = f'python3 -c "{REACH.format(port=url.rpartition(":")[2])}"'
    async with connect(url, "secret") as client:
        async with client.sandbox(network="host") as box:
            assert (await box.exec(reach)).output == "reached\n"
            assert (await box.exec("grep hosts: /etc/nsswitch.conf")).output == "hosts: files dns\n"
            assert (await box.exec("cat /etc/resolv.conf")).output == Path("/etc/resolv.conf").read_text()
            assert (await box.exec("echo x > /etc/resolv.conf")).exit_code != 0
            ports = "cat /proc/sys/net/ipv4/ip_unprivileged_port_start"
            assert (await box.exec(ports)).output == Path(ports.split()[1]).read_text()
            assert (await box.exec("ip link add dummy0 type dummy; ip link set lo down")).exit_code != 0
            async with box.fork() as twin:
                assert (await twin.exec(reach)).output == "reached\n"
        async with client.sandbox() as box:
            assert (await box.exec(reach)).exit_code == 1
            assert (await box.exec("ls /sys/class/net 2>/dev/null; cat /etc/resolv.conf")).output == ""
