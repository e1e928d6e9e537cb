"""A: when is a command over, and what does it leave in the shell."""

from __future__ import annotations

import pytest

from catalogue.sessions import NO_SLEEP, PATIENCE, Run, run_all, session
from skyenv.remote.client import connect

BIG = "x" * 200_000
MARKERS = (
    "###PS1JSON###", "SHELLPS1PREFIX", "__status=0", "EXITSTATUS0", "\\u0000 0", "FENCE_0", "CMD_DONE 0",
)  # fmt: skip


def heredoc(lines: int, width: int) -> str:
    text = "\n".join("y" * width for _ in range(lines))
    return f"wc -c <<'EOF'\n{text}\nEOF"


ROWS: dict[str, list[Run]] = {
    "A1 heredoc feeds a program": [Run("echo t && python3 <<'EOF'\nprint(0)\nEOF", "t\n0\n")],
    "A2 quotes in a quoted heredoc": [Run("cat <<'EOF'\na'b\"c\nEOF", "a'b\"c\n")],
    "A3 heredoc at the end without newline": [Run("cat > f <<EOF\nx\nEOF"), Run("cat f", "x\n")],
    "A5 heredoc of 500 lines": [Run(heredoc(500, 80), "40500\n")],
    "A5 heredoc of 5 MB": [Run(heredoc(5000, 1000), "5005000\n")],
    "A6 unterminated quote": [Run("echo 'abc", code=2)],
    "A6 unterminated heredoc": [Run("cat <<EOF\nx", lambda out: out.endswith("x\n"))],
    "A6 unterminated substitution": [Run("echo $(ls", code=2)],
    "A6 unterminated if": [Run("if true; then", code=2)],
    "A6 stray fi": [Run("fi", code=2)],
    "A7 awk and delimiter lines": [Run("awk 'BEGIN{print \"\\n\"}'\ncat <<'X'\nEOF\nX", "\n\nEOF\n")],
    "A9 prompt variables": [
        Run("PS1='(testbed) \\u@\\h# '; PROMPT_COMMAND='echo hi'; PS4='#'"),
        Run("echo ok", "ok\n"),
    ],
    "A9 environments that set prompts": [Run("source activate testbed", code=1), Run("echo ok", "ok\n")],
    "A9 markers of other shells": [Run(f"printf '%s\\n' '{mark}' >&2", f"{mark}\n") for mark in MARKERS],
    "A10 exit": [
        Run("cd /usr; export KEPT='a b'; lost=1"),
        Run("exit 7", "", code=7, restarted=True),
        Run("pwd; echo $KEPT${lost-}", "/usr\na b\n"),
    ],
    "A11 exit with a background job": [Run("sleep 600 & exit 1", code=1, restarted=True)],
    "A12 sticky set -euo pipefail": [
        Run("set -euo pipefail"),
        Run("false", code=1, restarted=True),
        Run("echo [$UNSET]", "[]\n"),
    ],
    "A13 set -e stops the command": [Run("set -e\nfalse\necho survived", "", code=1, restarted=True)],
    "A13 set -e after a failure still stops": [
        Run("false", code=1),
        Run("set -e\nfalse\necho survived", "", code=1, restarted=True),
    ],
    "A15 state carries over": [
        Run("cd /usr; export A=1; f(){ echo f; }; shopt -s nullglob; B=2"),
        Run("pwd; echo $A $B; f; shopt -q nullglob && echo on", "/usr\n1 2\nf\non\n"),
    ],
    "A15 last status carries over": [Run("(exit 42)", code=42), Run("echo $?", "42\n"), Run("echo $?", "0\n")],
    "A16 braces and process id": [Run("true | true; { echo in; }; [ $$ = $BASHPID ] && echo same", "in\nsame\n")],
    "A16 heredoc words": [Run("cat <<'END-OF_IT'\n$$ { }\nEND-OF_IT", "$$ { }\n")],
    "A17 several commands": [Run("echo a\necho b", "a\nb\n")],
    "A17 empty command": [Run("", ""), Run("# only a comment", ""), Run("\n\n", "")],
    "A20 somebody's own tmux session": [
        Run("tmux new -d -s test-session; tmux new -d -s test-session", code=1),
        Run("tmux kill-server; echo ok", "ok\n"),
    ],
    "A20 somebody's own files where ours are": [
        Run("cd /run/skyenv && mkdir out.{1..9} status exports bash terminal 2>/dev/null; cd", code=None),
        Run("false", code=1),
        Run("exit 3", code=3, restarted=True),
        Run("echo ok", "ok\n"),
    ],
    "A22 ignored interrupt": [
        Run("bash -c 'trap \"\" INT TERM; sleep 300'", code=124, timeout=0.3, timed_out=True),
        NO_SLEEP,
    ],
    "A25 pagers": [
        Run("seq 3 | less; seq 3 | more; man ls >/dev/null 2>&1; git -C /tmp log", code=128),
        Run("git init -q r; cd r; seq 500 > f; git add f; git -c user.name=a -c user.email=a@b commit -qm 1"),
        Run("seq 600 > f"),
        Run("git log | head -1 >/dev/null; git log >/dev/null; git diff | tail -1", "+600\n"),
        Run("less /etc/passwd >/dev/null; systemctl; PAGER=less psql", code=None),
    ],
    "A26 long silent command": [
        Run("grep -R nothing_like_this / 2>/dev/null", code=None, timeout=0.5),
    ],
    "A28 closed descriptors": [Run('for i in $(seq 3 255); do eval "exec $i>&-"; done', code=None, restarted=True)],
    "A28 no file size": [Run("ulimit -f 0; echo x", "x\n")],
    "A28 no descriptors": [Run("ulimit -n 3", code=None, restarted=True), Run("echo ok", "ok\n")],
    "A28 no memory": [Run("ulimit -v 1000; ls", code=None), Run("true", code=None)],
    "A28 unset PATH": [Run("unset PATH; ls", code=127), Run("PATH=/bin:/usr/bin; ls / >/dev/null")],
    "A28 kill the shell": [Run("kill -9 $$", code=137, restarted=True)],
    "A28 kill the process group": [Run("kill 0", code=143, restarted=True)],
    "A28 kill everything": [Run("kill -9 -1", code=None), Run("true", code=None)],
    "A28 kill the init": [Run("kill -9 1; kill -INT 1; kill -TERM 1; kill -STOP 1; echo done", "done\n")],
    "A28 traps": [Run("trap 'echo x' EXIT DEBUG ERR"), Run("echo ok", lambda out: "ok\n" in out)],
    "A28 exit trap prints": [Run("trap 'echo bye' EXIT; exit 3", lambda out: "bye" in out, code=3, restarted=True)],
    "A28 xtrace and verbose": [Run("set -xv"), Run("echo ok", lambda out: out.endswith("ok\n"))],
    "A28 break outside a loop": [Run("break", code=0), Run("continue", code=0)],
    "A28 return": [Run("return 5; echo no", "", code=5)],
    "A28 redirected shell": [Run("exec >/tmp/log 2>&1; echo hidden"), Run("cat /tmp/log", "hidden\n")],
    "A28 exec replaces the shell": [Run("exec echo gone", "gone\n", restarted=True)],
    "A28 exec of a slow program": [Run("exec sleep 0.3", "", restarted=True)],
    "A28 stopped shell": [Run("kill -STOP $$", code=124, timeout=0.3, timed_out=True, restarted=True)],
    "A28 deleted directory": [Run("mkdir /tmp/d; cd /tmp/d; rmdir /tmp/d"), Run("exit 1", code=1, restarted=True)],
    "A28 posix mode and noclobber": [Run("set -o posix; set -o noclobber"), Run("echo ok", "ok\n")],
    "A28 changed IFS and globbing": [Run("IFS=/:.; set -f"), Run("echo ok", "ok\n")],
    "A28 noexec": [Run("set -n", code=None, timeout=0.3), Run("true", code=None)],
    "A28 aliases and functions over builtins": [
        Run("shopt -s expand_aliases; alias unset=false export=false; printf(){ :; }; export(){ :; }"),
        Run("echo ok", "ok\n"),
    ],
    "A28 a function called builtin": [Run("builtin(){ sleep 600; }"), Run("echo ok", "ok\n")],
    "A28 read-only variables": [
        Run("readonly R=1; export R"),
        Run("exit 2", code=2, restarted=True),
        Run("echo $R", "1\n"),
    ],
    "A28 exported multi-line value": [
        Run("export M=$'a\\nb\\'\"$x`'"),
        Run("exit 2", code=2, restarted=True),
        Run('echo "$M"', "a\nb'\"$x`\n"),
    ],
    "A28 unset of a default": [Run("unset PAGER"), Run("exit 0", restarted=True), Run("echo [$PAGER]", "[]\n")],
    "A28 carriage returns stay": [
        Run("printf 'a\\r\\nb\\r' | od -An -c", lambda out: out.split() == ["a", "\\r", "\\n", "b", "\\r"]),
    ],
    "A28 NUL in a command": [Run("echo a\0b", "ab\n")],
    "A28 unicode": [Run("echo 'grüße 漢字 🙂'", "grüße 漢字 🙂\n")],
    "A28 a line of 200 kB": [Run(f"echo {BIG} | wc -c", "200001\n")],
    "A28 history expansion": [Run('echo "hi!" !x', "hi! !x\n")],
    "A28 remove everything": [Run("rm -rf --no-preserve-root / 2>/dev/null", code=None)],
    "A28 remove the session's files": [
        Run("rm -rf /run/skyenv/* /run/skyenv/.* /dev/null 2>/dev/null", code=None),
    ],
    "A28 fill the session's disk": [
        Run("head -c 300M /dev/zero > /run/skyenv/x", code=1),
        Run("rm -f /run/skyenv/x"),
    ],
}  # fmt: skip

SH_ROWS = [
    "A1 heredoc feeds a program", "A5 heredoc of 5 MB", "A10 exit", "A13 set -e stops the command",
    "A13 set -e after a failure still stops", "A15 last status carries over", "A17 several commands",
    "A17 empty command", "A28 unset PATH", "A28 kill the shell", "A28 exec replaces the shell",
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
async def test_session_survives(url: str, row: str) -> None:
    await run_all(url, ROWS[row])


@pytest.mark.parametrize("row", SH_ROWS)
async def test_session_of_a_plain_sh_survives(local_url: str, row: str) -> None:
    """Images without bash get the same protocol on their `sh`."""
    await run_all(local_url, [Run("echo ${BASH_VERSION-none}", "none\n"), *ROWS[row]], shell="sh")


async def test_a19_a_large_environment(url: str) -> None:
    env = {"BIG": "b" * 130_000, **{f"V{n}": f"{n}'\"\n$x" * 200 for n in range(200)}, "PATH": "/opt/x:/usr/bin:/bin"}
    assert sum(map(len, env.values())) > 300_000
    async with session(url, env=env) as box:
        for _again in range(2):
            counted = await box.exec('echo ${#BIG} "$PATH"; env | grep -c "^V[0-9]"')
            assert counted.output == "130000 /opt/x:/usr/bin:/bin\n200\n"
            await box.exec("exit 1")


async def test_a23_the_first_command_is_ready(local_url: str) -> None:
    """Nobody guesses when a session is ready: the first command after a start answers, 100 times in a row."""
    async with connect(local_url, "secret") as client:
        for number in range(100):
            async with client.sandbox() as box:
                first = await box.exec(f"echo {number}", timeout=PATIENCE)
                assert (first.output, first.timed_out) == (f"{number}\n", False)


@pytest.mark.docker
async def test_a23_the_first_command_in_a_container_is_ready(docker_url: str) -> None:
    async with connect(docker_url, "secret") as client:
        for number in range(4):
            async with client.sandbox() as box:
                assert (await box.exec(f"echo {number}", timeout=PATIENCE)).output == f"{number}\n"
