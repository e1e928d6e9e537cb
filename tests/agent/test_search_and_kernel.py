"""`search`, `ipython` and the shell of the preset `openhands`, on real sandboxes."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from skyenv.core import Sandbox, SandboxProvider, Tool
from skyenv.tools import IPython, Search, check_arguments
from skyenv.tools.openhands import OpenHandsBash

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = {
    "/tmp/r/a.py": b"import os\n\ndef f():\n    return 12\n",
    "/tmp/r/sub/b.py": b"def g():\n    return f()  # caf\xe9\n",
    "/tmp/r/sub/c.txt": b"def not code\nF(\n",
    "/tmp/r/.git/d.py": b"def hidden():\n",
    "/tmp/r/e.py": b"\0def binary\n",
    "/tmp/r/it's $(touch inj) -n.py": b"def odd():\n",
}


async def call(made: Tool, box: Sandbox, **arguments: Any) -> str:
    checked = check_arguments(made.spec, arguments)
    assert isinstance(checked, dict), checked
    with anyio.fail_after(100):
        return await made.run(checked, box)


async def test_search(client: SandboxProvider) -> None:
    async with client.sandbox() as box:
        for path, data in FILES.items():
            await box.write_file(path, data)
        find = Search(workdir="/tmp/r")
        odd = "/tmp/r/it's $(touch inj) -n.py:1:def odd():"
        defs = ["/tmp/r/a.py:3:def f():", odd, "/tmp/r/sub/b.py:1:def g():", "/tmp/r/sub/c.txt:1:def not code"]
        assert (await call(find, box, pattern=r"^def \w+")).split("\n") == defs
        assert (await call(find, box, pattern="^def", glob="*.py")).split("\n") == defs[:3]
        assert (await call(find, box, pattern="^def", glob="sub/*", path="/tmp/r")).split("\n") == defs[2:]
        assert await call(find, box, pattern=r"return \d+", path="a.py") == "/tmp/r/a.py:4:    return 12"
        assert "c.txt:2:F(" in await call(find, box, pattern=r"f\(", ignore_case="true")
        context = await call(find, box, pattern="return 12", context=1)
        assert context == "/tmp/r/a.py-3-def f():\n/tmp/r/a.py:4:    return 12"
        assert await call(find, box, pattern="nowhere at all") == "No matches."
        short = await call(find, box, pattern="def", max_results=2)
        assert short.split("\n")[2:] == ["[More matches were left out; narrow the pattern, the path or the glob.]"]
        for hostile in ("$(touch inj)", "'; touch inj; '", "`touch inj`", "-e", "--help", "\\", "*", "[", "(", "a{"):
            for arguments in (
                {"pattern": hostile},
                {"pattern": "def", "glob": hostile},
                {"pattern": "x", "path": hostile},
            ):
                assert isinstance(await call(find, box, **arguments), str)
        made = (await box.exec("find / -name inj -not -path '/proc/*' 2>/dev/null")).output
        assert made == ""
        assert "not a regular expression" in await call(find, box, pattern="(")
        assert "no such file" in await call(find, box, pattern="x", path="/none")
        for wrong in (
            {"pattern": ""},
            {"pattern": "a\nb"},
            {"pattern": "a", "context": 99},
            {"pattern": "a", "glob": ""},
        ):
            assert (await call(find, box, **wrong)).startswith("ERROR")
        await box.write_file("/tmp/r/slow.txt", b"a" * 100 + b"!\n")
        slow = await call(find, box, pattern="^(a|a?)+$", path="slow.txt")
        assert slow.startswith("No matches.\n[Not everything could be searched: grep: /tmp/r/slow.txt: exceeded")
        assert await call(find, box, pattern="^zq{3}$", path="/tmp") == "No matches."
        await box.write_file("/tmp/r/long.txt", b"needle " + b"x" * 5000 + b"\n")
        assert "more characters]" in await call(find, box, pattern="needle")


async def test_search_leaves_the_shell_as_it_is(client: SandboxProvider) -> None:
    async with client.sandbox() as box:
        await box.write_file("/tmp/r/a.py", b"def f():\n")
        await box.exec("cd /tmp/r; alias grep=false; find() { echo no; }; LC_ALL=xx; x=kept")
        assert "a.py:1:" in await call(Search(workdir="/tmp/r"), box, pattern="def")
        assert (await box.exec("echo $x $LC_ALL; pwd")).output == "kept xx\n/tmp/r\n"
        await box.exec("sleep 100", soft_timeout=0.2)
        assert "still running" in await call(Search(workdir="/tmp/r"), box, pattern="def")


async def test_search_without_programs_finds_plain_text(client: SandboxProvider) -> None:
    async with client.sandbox() as box:
        for path, data in FILES.items():
            await box.write_file(path, data)
        await box.exec("export PATH=/nowhere")
        find = Search(workdir="/tmp/r")
        found = await call(find, box, pattern="return", glob="*.py")
        assert found.startswith("/tmp/r/a.py:4:    return 12\n/tmp/r/sub/b.py:2:    return f")
        assert "no grep" in found
        assert (await call(find, box, pattern="ret.*")).startswith("ERROR: this sandbox has no grep")


async def test_cells_share_a_namespace(client: SandboxProvider) -> None:
    async with client.sandbox() as box:
        kernel = IPython()
        assert (
            await call(kernel, box, code="import os\nx = 20\ndef f(n):\n    return n + 1")
            == "[The cell printed nothing.]"
        )
        assert await call(kernel, box, code="print('a')\nf(x)") == "a\n21"
        assert await call(kernel, box, code="'\u00e9\\'\u4e16'") == '"\u00e9\'\u4e16"'
        trace = await call(kernel, box, code="def g():\n    return 1 / 0\ng()")
        assert "ZeroDivisionError" in trace
        assert "    return 1 / 0" in trace
        assert "script.py" not in trace
        assert "SyntaxError" in await call(kernel, box, code="def (")
        assert "SystemExit: 3" in await call(kernel, box, code="import sys; sys.exit(3)")
        assert "EOFError" in await call(kernel, box, code="input()")
        assert await call(kernel, box, code="import subprocess\n_ = subprocess.run(['echo', 'child'])") == "child"
        assert await call(kernel, box, code="x") == "20"
        assert (await box.exec("echo shell; jobs")).output == "shell\n"


async def test_hostile_cells(client: SandboxProvider) -> None:
    async with client.sandbox() as box:
        kernel = IPython(max_chars=2000, timeout=60.0)
        await call(kernel, box, code="x = 1")
        slow = await call(kernel, box, code="import time\nprint('begun')\ntime.sleep(100)", timeout=5)
        assert slow.startswith("begun")
        assert "KeyboardInterrupt" in slow
        assert "ran longer than 5 seconds" in slow
        assert await call(kernel, box, code="x") == "1"
        stubborn = "while True:\n    try:\n        time.sleep(100)\n    except KeyboardInterrupt:\n        pass"
        assert "process ended" in await call(kernel, box, code=stubborn, timeout=1)
        assert "NameError" in await call(kernel, box, code="x")
        assert "process ended" in await call(kernel, box, code="import os\nos._exit(0)")
        assert await call(kernel, box, code="print(r'$(touch /tmp/inj) `id` \"')") == '$(touch /tmp/inj) `id` "'
        await box.kill_processes()
        assert await call(kernel, box, code="2") == (
            "2\n[The Python process was gone and a new one was started: "
            "variables and imports of earlier cells are gone.]"
        )
        long = await call(kernel, box, code="for i in range(100_000): print(i)")
        assert long.startswith("0\n1\n")
        assert "\n99999" in long
        assert len(long) < 2200
        path = long.split("the full text is in ")[1].split(" ")[0]
        assert (await box.exec(f"tail -n 1 {path}")).output == "99999\n"
        assert "must be greater" in await call(kernel, box, code="1", timeout=-1)
        await box.exec("sleep 100", soft_timeout=0.2)
        assert "still running" in await call(kernel, box, code="1")


async def test_no_python_no_kernel(client: SandboxProvider) -> None:
    async with client.sandbox() as box:
        await box.exec("mkdir /tmp/bin; for p in sh rm mkfifo sleep cat; do ln -s $(command -v $p) /tmp/bin/$p; done")
        await box.exec("export PATH=/tmp/bin")
        assert await call(IPython(), box, code="1") == "ERROR: there is no python in this sandbox. Nothing was run."


async def test_openhands_shell(client: SandboxProvider) -> None:
    async with client.sandbox() as box:
        shell = OpenHandsBash(soft_timeout=2.5)
        answer = (await call(shell, box, command="cd /tmp; echo hi; false")).split("\n")
        assert answer[:3] == ["hi", "[The command completed with exit code 1.]", "[Current working directory: /tmp]"]
        assert answer[-1] == "[Command finished with exit code 1]"
        assert (await call(shell, box, command="echo $?")).startswith("1\n")
        assert "has no new output after 2.5 seconds" in await call(shell, box, command="sleep 100")
        assert "is NOT executed" in await call(shell, box, command="ls")
        assert "CTRL+C was sent" in await call(shell, box, command="C-c", is_input="true")
        assert (await call(shell, box, command="echo free")).startswith("free\n")
