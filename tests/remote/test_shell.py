"""What a model's commands do to a session: each row is a known way in which persistent shells break elsewhere.

After every row the same session must answer `echo alive` within two seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from skyenv.remote.client import connect
from skyenv.types import ExecResult

BIG = "x" * 200_000
LINES = "".join(f"{n}\n" for n in range(1, 200_001))


@dataclass(frozen=True)
class Run:
    """A command, and what it must come to; None means: whatever."""

    command: str
    output: str | Callable[[str], bool] | None = None
    code: int | None = 0
    timeout: float = 10.0
    restarted: bool = False
    timed_out: bool = False
    within: float = 5.0
    options: dict[str, Any] = field(default_factory=dict)


def heredoc(lines: int, width: int) -> str:
    text = "\n".join("y" * width for _ in range(lines))
    return f"wc -c <<'EOF'\n{text}\nEOF"


ROWS: dict[str, list[Run]] = {
    # Completion and shell state
    "heredoc feeds a program": [Run("echo t && python3 <<'EOF'\nprint(0)\nEOF", "t\n0\n")],
    "quotes in a quoted heredoc": [Run("cat <<'EOF'\na'b\"c\nEOF", "a'b\"c\n")],
    "heredoc at the end without newline": [Run("cat > f <<EOF\nx\nEOF"), Run("cat f", "x\n")],
    "heredoc of 500 lines": [Run(heredoc(500, 80), "40500\n")],
    "heredoc of 5 MB": [Run(heredoc(5000, 1000), "5005000\n")],
    "unterminated quote": [Run("echo 'abc", code=2, within=3.0)],
    "unterminated heredoc": [Run("cat <<EOF\nx", lambda out: out.endswith("x\n"), within=3.0)],
    "unterminated substitution": [Run("echo $(ls", code=2, within=3.0)],
    "unterminated if": [Run("if true; then", code=2, within=3.0)],
    "stray fi": [Run("fi", code=2, within=3.0)],
    "awk and delimiter lines": [Run("awk 'BEGIN{print \"\\n\"}'\ncat <<'X'\nEOF\nX", "\n\nEOF\n")],
    "prompt variables": [
        Run("PS1='(testbed) \\u@\\h# '; PROMPT_COMMAND='echo hi'; PS4='#'"),
        Run("echo ok", "ok\n"),
    ],
    "exit": [
        Run("cd /usr; export KEPT='a b'; lost=1"),
        Run("exit 7", "", code=7, restarted=True),
        Run("pwd; echo $KEPT${lost-}", "/usr\na b\n"),
    ],
    "exit with a background job": [Run("sleep 600 & exit 1", code=1, restarted=True, within=3.0)],
    "sticky set -euo pipefail": [
        Run("set -euo pipefail"),
        Run("false", code=1, restarted=True),
        Run("echo [$UNSET]", "[]\n"),
    ],
    "set -e stops the command": [Run("set -e\nfalse\necho survived", "", code=1, restarted=True)],
    "set -e after a failure still stops": [
        Run("false", code=1),
        Run("set -e\nfalse\necho survived", "", code=1, restarted=True),
    ],
    "state carries over": [
        Run("cd /usr; export A=1; f(){ echo f; }; shopt -s nullglob; B=2"),
        Run("pwd; echo $A $B; f; shopt -q nullglob && echo on", "/usr\n1 2\nf\non\n"),
    ],
    "last status carries over": [Run("(exit 42)", code=42), Run("echo $?", "42\n"), Run("echo $?", "0\n")],
    "braces and process id": [Run("true | true; { echo in; }; [ $$ = $BASHPID ] && echo same", "in\nsame\n")],
    "several commands": [Run("echo a\necho b", "a\nb\n")],
    "empty command": [Run("", ""), Run("# only a comment", ""), Run("\n\n", "")],
    "aliases and functions over builtins": [
        Run("shopt -s expand_aliases; alias unset=false export=false; printf(){ :; }; export(){ :; }"),
        Run("echo ok", "ok\n"),
    ],
    "a function called builtin": [Run("builtin(){ sleep 60; }"), Run("echo ok", "ok\n")],
    "ignored interrupt": [
        Run("bash -c 'trap \"\" INT TERM; sleep 300'", code=124, timeout=0.3, timed_out=True),
        Run("ps -e | grep -c '[s]leep'", "0\n", code=1),
    ],
    "long silent command": [Run("grep -R nothing_like_this /proc 2>/dev/null", code=None, timeout=0.5, within=6.0)],
    "closed descriptors": [Run('for i in $(seq 3 255); do eval "exec $i>&-"; done', code=None, restarted=True)],
    "no file size": [Run("ulimit -f 0; echo x", "x\n")],
    "no descriptors": [Run("ulimit -n 3", code=None, restarted=True), Run("echo ok", "ok\n")],
    "no memory": [Run("ulimit -v 1000; ls", code=None), Run("true", code=None)],
    "unset PATH": [Run("unset PATH; ls", code=127), Run("PATH=/bin:/usr/bin; ls / >/dev/null")],
    "kill the shell": [Run("kill -9 $$", code=137, restarted=True)],
    "kill the process group": [Run("kill 0", code=143, restarted=True)],
    "kill everything": [Run("kill -9 -1", code=None), Run("true", code=None)],
    "kill the init": [Run("kill -9 1; kill -INT 1; kill -TERM 1; kill -STOP 1; echo done", "done\n")],
    "traps": [Run("trap 'echo x' EXIT DEBUG ERR"), Run("echo ok", lambda out: "ok\n" in out)],
    "exit trap prints": [Run("trap 'echo bye' EXIT; exit 3", lambda out: "bye" in out, code=3, restarted=True)],
    "xtrace and verbose": [Run("set -xv"), Run("echo ok", lambda out: out.endswith("ok\n"))],
    "break outside a loop": [Run("break", code=0), Run("continue", code=0)],
    "return": [Run("return 5; echo no", "", code=5)],
    "redirected shell": [Run("exec >/tmp/log 2>&1; echo hidden"), Run("cat /tmp/log", "hidden\n")],
    "exec replaces the shell": [Run("exec echo gone", "gone\n", restarted=True)],
    "exec of a slow program": [Run("exec sleep 0.3", "", restarted=True, within=2.0)],
    "stopped shell": [Run("kill -STOP $$", code=124, timeout=0.3, timed_out=True, restarted=True)],
    "deleted directory": [Run("mkdir /tmp/d; cd /tmp/d; rmdir /tmp/d"), Run("exit 1", code=1, restarted=True)],
    "posix mode and noclobber": [Run("set -o posix; set -o noclobber"), Run("echo ok", "ok\n")],
    "changed IFS and globbing": [Run("IFS=/:.; set -f"), Run("echo ok", "ok\n")],
    "read-only variables": [
        Run("readonly R=1; export R"),
        Run("exit 2", code=2, restarted=True), Run("echo $R", "1\n"),
    ],
    "exported multi-line value": [
        Run("export M=$'a\\nb\\'\"$x`'"),
        Run("exit 2", code=2, restarted=True),
        Run('echo "$M"', "a\nb'\"$x`\n"),
    ],
    "unset of a default": [Run("unset PAGER"), Run("exit 0", restarted=True), Run("echo [$PAGER]", "[]\n")],
    "carriage returns stay": [
        Run("printf 'a\\r\\nb\\r' | od -An -c", lambda out: out.split() == ["a", "\\r", "\\n", "b", "\\r"]),
    ],
    "NUL in a command": [Run("echo a\0b", "ab\n")],
    "unicode": [Run("echo 'grüße 漢字 🙂'", "grüße 漢字 🙂\n")],
    "a line of 200 kB": [Run(f"echo {BIG} | wc -c", "200001\n")],
    "history expansion": [Run('echo "hi!" !x', "hi! !x\n")],
    "noexec": [Run("set -n", code=None, timeout=0.3, within=6.0), Run("true", code=None)],
    # Standard input
    "reading standard input": [
        Run("cat; read x; echo [$x]; python3; sh", "[]\n", within=3.0),
        Run("python3 -c 'input()'", code=1),
    ],
    "background job reads nothing": [Run("cat > /tmp/x & wait; wc -c < /tmp/x", "0\n")],
    "standard input through a pipe": [Run("seq 2 | cat < /dev/stdin", "1\n2\n")],
    "no terminal": [Run("stty -a; tput cols >/dev/null; tty", code=1)],
    "pagers": [Run("seq 3 | less; seq 3 | more; man ls >/dev/null 2>&1; git -C /tmp log", code=128)],
    "password prompts": [Run("su user -c 'su root -c id'; ssh nowhere true", code=None)],
    # Background work and process trees
    "background child holds the output": [
        Run("sleep 600 &", "", within=3.0),
        Run("nohup sleep 600 >/dev/null 2>&1 &", "", within=3.0),
    ],
    "background output stays out of the next result": [
        Run("(sleep 0.2; echo late) & echo now", "now\n", within=3.0),
        Run("sleep 0.5; echo next", "next\n"),
    ],
    "a tree outlives nothing": [
        Run(
            "python3 -c 'import subprocess,time;"
            'subprocess.Popen(["sh","-c","sleep 600"]);time.sleep(600)\'',
            code=124,
            timeout=0.7,
            timed_out=True,
        ),
        Run("ps -e | grep -c '[s]leep'", "0\n", code=1),
    ],
    "timeout bounds the whole list": [
        Run("sleep 0.1 | sleep 600; sleep 600; sleep 600", code=124, timeout=0.3, timed_out=True)
    ],
    "background job survives a later timeout": [
        Run("sleep 601 & sh -c 'sleep 602; true' &"),
        Run("sleep 600", code=124, timeout=0.2, timed_out=True),
        Run("ps -eo args | grep -c '^sleep 60[12]'", "2\n"),
    ],
    "partial output of a timeout": [Run("echo part; sleep 60", "part\n", code=124, timeout=0.3, timed_out=True)],
    "busy shell": [Run("while :; do :; done", code=124, timeout=0.2, timed_out=True, restarted=True)],
    "fork bomb": [Run(":(){ :|:& };:", code=None, timeout=0.5, within=9.0)],
    "exit codes": [
        Run("nosuchcmd", lambda out: "nosuchcmd" in out, code=127),
        Run("touch /tmp/n; /tmp/n", code=126),
        Run("sh -c 'kill -9 $$'", code=137),
        Run("sh -c 'kill -TERM $$'", code=143),
    ],
    "other shells": [
        Run("bash -ic 'echo hi' 2>/dev/null", "hi\n"),
        Run("bash -lc 'echo hi'", "hi\n"),
        Run("su - user -c 'id -un' 2>/dev/null", "user\n"),
        Run("script -qc 'echo hi' /dev/null", "hi\r\n"),
    ],
    "orphans are reaped": [
        Run("for i in $(seq 50); do (sh -c 'true &' &); done; sleep 0.3"),
        Run("ps -eo stat | grep -c Z", "0\n", code=1),
    ],
    "stopped background job": [Run("sleep 600 & kill -STOP $!"), Run("kill -CONT %1 2>/dev/null; kill $!", code=None)],
    # Output
    "bytes that are not text": [
        Run("printf '\\xff\\xfe\\x00ok'", "��\x00ok"),
        Run("cat /bin/ls | wc -c; head -c 100000 /dev/urandom", code=0),
    ],
    "every line arrives": [Run("seq 1 200000", LINES, options={"max_output_bytes": 1 << 22})],
    "long line": [Run("printf '%010000d' 7", "7".rjust(10000, "0"))],
    "progress bars and colours": [Run("printf '1%%\\r2%%\\r\\033[31mred\\033[0m'", "1%\r2%\r\x1b[31mred\x1b[0m")],
    "errors through a pipe": [Run("ls /nope 2>&1 | tail -1", lambda out: "/nope" in out)],
    "order of both streams": [Run("echo a; echo b >&2; echo c", "a\nb\nc\n")],
    "100 MB": [Run("yes | head -c 100000000", lambda out: len(out) < 1 << 21, timeout=30.0, within=20.0)],
    "writer to a closed pipe": [Run("yes | head -1", "y\n"), Run("set -o pipefail; yes | head -1", "y\n", code=141)],
    "reopened output": [Run("echo a > /dev/stdout; echo b > /dev/stderr; echo c > /proc/self/fd/1", "a\nb\nc\n")],
    "output from another user": [Run("su user -c 'echo a; echo b > /dev/stderr'", "a\nb\n")],
    # Damage
    "remove everything": [Run("rm -rf --no-preserve-root / 2>/dev/null", code=None, timeout=20.0, within=20.0)],
    "remove the session's files": [Run("rm -rf /run/skyenv/* /run/skyenv/.* /dev/null 2>/dev/null", code=None)],
    "fill the session's disk": [Run("head -c 300M /dev/zero > /run/skyenv/x", code=1), Run("rm -f /run/skyenv/x")],
}  # fmt: skip


def check(run: Run, result: ExecResult) -> None:
    if callable(run.output):
        assert run.output(result.output), result
    elif run.output is not None:
        assert result.output == run.output, result
    if run.code is not None:
        assert result.exit_code == run.code, result
        assert result.session_restarted == run.restarted, result
        assert result.timed_out == run.timed_out, result
    assert result.seconds < run.within, result
    assert not result.running


SH_ROWS = [
    "heredoc feeds a program", "heredoc of 5 MB", "exit", "set -e stops the command",
    "set -e after a failure still stops", "last status carries over", "several commands", "empty command",
    "unset PATH", "kill the shell", "exec replaces the shell",
    "reading standard input", "background child holds the output", "partial output of a timeout", "exit codes",
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
async def test_session_survives(local_url: str, row: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox(pids=256) as box:
        for run in ROWS[row]:
            check(run, await box.exec(run.command, timeout=run.timeout, **run.options))
        alive = await box.exec("echo alive", timeout=2.0)
        assert alive.output.endswith("alive\n"), alive
        assert not alive.timed_out


@pytest.mark.parametrize("row", SH_ROWS)
async def test_session_of_a_plain_sh_survives(local_url: str, row: str) -> None:
    """Images without bash get the same protocol on their `sh`."""
    async with connect(local_url, "secret") as client, client.sandbox(pids=256, shell="sh") as box:
        assert (await box.exec("echo ${BASH_VERSION-none}")).output == "none\n"
        for run in ROWS[row]:
            check(run, await box.exec(run.command, timeout=run.timeout, **run.options))
        alive = await box.exec("echo alive", timeout=2.0)
        assert (alive.output, alive.timed_out) == ("alive\n", False)
