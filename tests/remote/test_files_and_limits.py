"""Files, limits and isolation beyond the conformance suite: odd names, hostile links, memory, processes, the host."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import httpx
import pytest
from blockbuster import blockbuster_ctx

from skyenv.errors import ConfigError, SandboxError, SandboxPathError
from skyenv.remote.client import connect

MiB = 1 << 20


async def test_names_that_are_not_text(url: str) -> None:
    async with connect(url, "secret") as client, client.sandbox() as box:
        path = "/root/n\n\udcff &?#%41\\'\"ü"
        await box.write_file(path, b"\r\n\xff")
        assert await box.read_file(path) == b"\r\n\xff"
        assert [entry.path for entry in await box.list_dir("/root") if entry.kind == "file"] == [path]
        await box.upload("/root/copy", await box.download("/root", exclude=[".pyenv"]))
        assert (await box.exec("ls -b copy; cd copy; cat *")).output.endswith("\r\n\ufffd")
        await box.remove(path)
        with pytest.raises(SandboxPathError) as caught:
            await box.stat(path)
        assert caught.value.errno == 2


async def test_links_stay_inside(url: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    os.chmod(tmp_path, 0o755)
    async with connect(url, "secret") as client, client.sandbox() as box:
        await box.exec(
            f"ln -s {secret} a; ln -s /proc/1/root{secret} b; ln -s ../../../../../../../..{secret} c; ln -s / d"
        )
        for path in ("/root/a", "/root/b", "/root/c", f"/root/d{secret}", str(secret), f"/proc/1/root{secret}"):
            with pytest.raises(SandboxPathError):
                await box.read_file(path)
        await box.write_file("/root/a", b"of the sandbox")
        assert secret.read_text() == "of the host"
        assert await box.read_file(str(secret)) == b"of the sandbox"


async def test_the_host_is_not_visible(local_url: str) -> None:
    marker = f"marker-{os.getpid()}"
    os.environ["SKYENV_TEST_SECRET"] = marker
    shared = Path("/dev/shm") / marker
    shared.touch()
    try:
        async with connect() as client, client.sandbox() as box:
            result = await box.exec(
                f"ls -A /dev/shm /tmp /run /home /mnt /opt /srv /var/lib; find / -name '{marker}' 2>/dev/null;"
                "tr '\\0' '\\n' </proc/1/environ; env; cat /proc/[0-9]*/cmdline; cat /etc/shadow; ls /root -A"
            )
            host_home = {entry.name for entry in Path.home().iterdir()} - {".pyenv"}
            assert marker not in result.output
            assert (await box.exec("touch /usr/marker /bin/marker")).exit_code == 1
            assert not host_home & set(result.output.split())
            assert "$" not in (await box.read_file("/etc/shadow")).decode()
            assert not {"docker.sock", "dbus", "secret"} & set((await box.exec("ls -R /run /var/run/")).output.split())
    finally:
        shared.unlink()
        del os.environ["SKYENV_TEST_SECRET"]


async def test_two_sandboxes_do_not_see_each_other(url: str) -> None:
    async with connect(url, "secret") as client, client.sandbox() as one, client.sandbox() as two:
        await one.exec("touch /tmp/of-one /dev/shm/of-one; exec -a of-one sleep 60 & python3 -m http.server 8000 &")
        result = await two.exec("find / -name of-one 2>/dev/null; ps -eo args; ls /dev/shm")
        assert "of-one" not in result.output
        reach = await two.exec("python3 -c \"import socket; socket.create_connection(('127.0.0.1', 8000), 1)\"")
        assert "refused" in reach.output


async def test_process_and_disk_limits(local_url: str) -> None:
    async with connect(local_url, "secret") as client:
        async with client.sandbox(pids=24, disk_bytes=16 * MiB, file_bytes=4 * MiB) as box:
            forks = await box.exec("sh -c 'for i in $(seq 60); do sleep 60 & done'", timeout=60)
            assert "fork" in forks.output
            await box.kill_processes()
            assert (await box.exec("echo alive")).output == "alive\n"
            large = await box.exec("head -c 5M /dev/zero > large")
            assert large.exit_code in (1, 153)
            full = await box.exec("for i in 1 2 3 4 5 6; do head -c 4M /dev/zero > f$i || exit 9; done")
            assert (full.exit_code, "No space left" in full.output) == (9, True)
            with pytest.raises(SandboxPathError) as caught:
                await box.write_file("/root/more", b"x" * MiB)
            assert caught.value.errno == 28
            assert (await box.exec("rm f*; echo alive > again; cat again")).output == "alive\n"


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ({"memory": 1}, "memory_bytes"),
        ({"memory_bytes": 1}, "memory_bytes"),
        ({"cpus": 0}, "cpus"),
        ({"ttl": "long"}, "ttl"),
        ({"shell": "zsh"}, "shell"),
        ({"env": {"A=B": "1"}}, "A=B"),
        ({"env": {"BIG": "x" * 140_000}}, "BIG"),
        ({"env": {f"V{n}": "x" * 100_000 for n in range(20)}}, "env"),
        ({"image": "python:3.12"}, "image"),
        ({"snapshot": "0" * 32}, "snapshot"),
    ],
)
async def test_a_wrong_spec_names_the_field(local_url: str, spec: dict[str, object], hint: str) -> None:
    async with connect(local_url, "secret") as client:
        with pytest.raises(ConfigError, match=hint):
            async with client.sandbox(**spec):  # type: ignore[arg-type]
                pass


async def test_snapshots_outlive_their_sandbox_and_end_when_forgotten(local_url: str) -> None:
    async with connect(local_url, "secret") as client:
        async with client.sandbox() as box:
            await box.exec("mkdir r && cd r && git init -q && echo a > a && git add . && ln a hard && rm -rf /etc/skel")
            snapshot = await box.snapshot(shell=False)
        async with client.sandbox(snapshot=snapshot) as one, client.sandbox(snapshot=snapshot) as two:
            await client.delete_snapshot(snapshot)
            await client.delete_snapshot(snapshot)
            for twin in (one, two):
                result = await twin.exec(
                    "cd r && git mv a b && mkdir d && git mv b d && git status -s; cat hard; ls /etc/skel"
                )
                assert result.output.startswith("AD a\n?? d/\n?? hard\na\n") or "d/b" in result.output, result
                assert "a\n" in result.output
        with pytest.raises(ConfigError, match="does not exist"):
            async with client.sandbox(snapshot=snapshot):
                pass


async def test_a_snapshot_is_taken_while_nothing_moves(url: str) -> None:
    writer = (
        "import itertools, os\nfor n in itertools.count():\n  for f in 'ab':\n"
        "    open('new', 'w').write(str(n)); os.rename('new', f)\n"
    )
    async with connect(url, "secret") as client, client.sandbox() as box:
        await box.write_file("/root/w.py", writer.encode())
        await box.exec("python3 w.py & until [ -e a ] && [ -e b ]; do sleep 0.05; done")
        async with box.fork(shell=False) as twin:
            result = await twin.exec("cat a; echo; cat b; echo; ps -e | grep -c python")
            first, second, programs = map(int, result.output.split())
            assert first - second in (0, 1)
            assert programs == 0
        goes_on = await box.exec('before=$(cat a); until [ "$(cat a)" != "$before" ]; do sleep 0.05; done', timeout=60)
        assert goes_on.exit_code == 0


async def test_reading_something_endless_is_bounded(url: str) -> None:
    async with connect(url, "secret") as client, client.sandbox() as box:
        await box.exec("truncate -s 10G huge")
        assert await box.read_file("/root/huge", max_bytes=10) == b"\0" * 10
        assert len(await box.read_file("/root/huge", offset=5 << 30, max_bytes=3 * MiB)) == 3 * MiB
        assert len(await box.read_file("/proc/self/status")) > 100


async def test_a_killed_file_operation_is_told(url: str) -> None:
    async with connect(url, "secret") as client, client.sandbox() as box:
        await box.exec("truncate -s 3G huge")
        told = anyio.Event()

        async def read() -> None:
            with pytest.raises(SandboxError, match="killed"):
                await box.read_file("/root/huge")
            told.set()

        with anyio.fail_after(100):
            async with anyio.create_task_group() as group:
                group.start_soon(read)
                while not told.is_set():
                    await box.exec("kill -9 -1")
        assert (await box.exec("echo alive")).output == "alive\n"


async def test_raw_requests_get_typed_refusals(local_url: str) -> None:
    headers = {"authorization": "Bearer secret", "idempotency-key": "k"}
    async with connect(local_url, "secret") as client, client.sandbox() as box:
        headers |= {"skyenv-sandbox-token": box.secret}
        async with httpx.AsyncClient(
            base_url=f"{local_url}/sandboxes/{box.name}", headers=headers, timeout=100
        ) as http:
            cases = [
                ("POST", "/exec?timeout=-1", 422, "config"),
                ("POST", "/exec?timeout=soon", 422, "config"),
                ("POST", "/exec?max_output_bytes=999999999999", 422, "config"),
                ("POST", "/exec?wait=x", 422, "config"),
                ("PUT", "/file", 400, "protocol"),
                ("PUT", "/file?path=/x&expected_bytes=9", 400, "protocol"),
                ("GET", "/file?path=/x&offset=-1", 422, "config"),
                ("GET", "/archive?path=/etc&exclude=%7B", 400, "protocol"),
                ("GET", "/file?path=%00", 404, "path"),
            ]
            for method, path, status, code in cases:
                answer = await http.request(method, path)
                assert (answer.status_code, answer.json().get("code")) == (status, code), (path, answer.text)
        async with httpx.AsyncClient(base_url=local_url, headers=headers, timeout=100) as http:
            for body in ("{", '{"images": 1}', '{"spec": {"memory_byte": 1}}', '{"env": {"A": 1}}'):
                answer = await http.put("/sandboxes/" + "e" * 32, content=body)
                assert (answer.status_code, answer.json()["code"]) == (422, "config"), answer.text
            for name in ("short", "E" * 32, "../../etc"):
                assert (await http.put(f"/sandboxes/{name}", content="{}")).status_code in (404, 422)
            assert (await http.get("/sandboxes/" + "f" * 32 + "/info?path=/")).json()["code"] == "lost"
            assert (await http.post("/leases", content="1")).json()["code"] == "protocol"


async def test_nothing_blocks_the_event_loop() -> None:
    async with connect() as client:
        with blockbuster_ctx("skyenv"):
            async with client.sandbox() as box:
                await box.exec("seq 100000")
                await box.write_file("/root/x", b"x" * 3 * MiB)
                await box.upload("/root/copy", await box.download("/root", exclude=[".pyenv"]))
                async with box.fork() as twin:
                    assert len(await twin.read_file("/root/copy/x")) == 3 * MiB


async def test_eight_sandboxes_work_at_once(local_url: str) -> None:
    async with connect(local_url, "secret") as client:

        async def work(number: int) -> None:
            async with client.sandbox() as box:
                for step in range(10):
                    result = await box.exec(f"echo {number} {step}; sleep 0.02")
                    assert result.output == f"{number} {step}\n"

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(work, number)


async def test_rootless_limits_without_control_groups(rootless_url: str) -> None:
    async with connect(rootless_url, "secret") as client:
        assert (await client.health())["limits"]["memory"] == "rlimit"
        async with client.sandbox(memory_bytes=200 * MiB, pids=20, file_bytes=4 * MiB) as box:
            assert "MemoryError" in (await box.exec("python3 -c 'x = bytearray(300 << 20)'")).output
            assert "fork" in (await box.exec("sh -c 'for i in $(seq 60); do sleep 60 & done'")).output
            await box.kill_processes()
            assert (await box.exec("head -c 5M /dev/zero > large")).exit_code in (1, 153)
            assert (await box.exec("echo alive")).output == "alive\n"
        with pytest.raises(ConfigError, match="disk_bytes"):
            async with client.sandbox(disk_bytes=16 * MiB):
                pass


TRAP = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) { close(open("/tmp/loaded", O_CREAT | O_WRONLY, 0600)); }
"""
ARM = (
    "sed -i 's/^passwd:.*/passwd: trap files/; s/^group:.*/group: trap files/' /etc/nsswitch.conf;"
    "for d in /lib/*-linux-gnu; do cp /root/trap.so $d/libnss_trap.so.2 2>/dev/null && exit; done;"
    "mkdir /opt/trap; cp /root/trap.so /opt/trap/libnss_trap.so.2; echo /opt/trap > /etc/ld.so.conf; ldconfig"
)


async def test_nothing_of_a_sandbox_is_loaded_into_its_init(url: str, tmp_path: Path) -> None:
    """User databases are looked up in libraries that a file in the sandbox names; file operations look nobody up."""
    (tmp_path / "trap.c").write_text(TRAP)
    build = ["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "trap.so"), str(tmp_path / "trap.c")]
    await anyio.run_process(build)
    async with connect(url, "secret") as client, client.sandbox() as box:
        await box.write_file("/root/trap.so", (tmp_path / "trap.so").read_bytes())
        armed = await box.exec(f"({ARM}); getent passwd 4711; rm /tmp/loaded; echo $?")
        assert armed.output.endswith("0\n"), armed
        await box.upload("/root/copy", await box.download("/root", exclude=[".pyenv"]))
        await box.stat("/root/copy/trap.so")
        assert (await box.exec("ls /tmp")).output == ""


CALLS = """
import ctypes, os, subprocess, threading
numbers = {"x86_64": 56, "aarch64": 220}
libc = ctypes.CDLL(None, use_errno=True)
for arguments in ((numbers[os.uname().machine], 0x10000000 | 17, 0, 0, 0, 0), (435, 0, 0)):
    print(libc.syscall(*map(ctypes.c_long, arguments)), ctypes.get_errno())
thread = threading.Thread(target=print, args=("thread",))
thread.start(); thread.join()
print(subprocess.run(["true"]).returncode)
"""


async def test_new_namespaces_are_refused_and_threads_are_not(url: str) -> None:
    async with connect(url, "secret") as client, client.sandbox() as box:
        await box.write_file("/root/calls.py", CALLS.encode())
        assert (await box.exec("python3 -u calls.py")).output == "-1 1\n-1 38\nthread\n0\n"
        assert (await box.exec("unshare -r true")).exit_code != 0
