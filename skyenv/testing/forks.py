"""What snapshots, forks and rollbacks of a sandbox must do; part of `check_sandbox` for providers that have them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from skyenv.core import Sandbox
from skyenv.errors import NotCarried

Check = Callable[[Sandbox, str], Awaitable[None]]

_SESSION = r"""
mkdir -p work && cd work
export SECRET='s e"c'; unexported=u; list=(a 'b c'); declare -A table=([x y]=1); declare -ir five=5
say() { echo "said $1"; }
alias greet='echo hello'; shopt -s nullglob; set -o pipefail; umask 027; set -- one 'two words'
text=$'lines\nand \xff\xfe bytes\t"$HOME" `x` \\'
trap 'true' USR1
false
"""
_TELL = r"""echo "$? $SECRET $unexported ${list[1]} ${table[x y]} $five $# $2"; say it; alias greet; shopt nullglob
set -o | grep pipefail; umask; pwd; printf %s "$text" | od -An -tx1 | tr -d ' \n'; trap -p USR1; five=6; echo $five
"""
# Every word that the dump of a state might use, and values that a naive one would break on.
_HOSTILE = r"""
declare() { echo fake; }; builtin() { echo fake; }; set() { echo fake; }; shopt() { echo fake; }; cd() { echo fake; }
trap() { echo fake; }; alias() { echo fake; }; umask() { echo fake; }; command() { echo fake; }; eval() { echo fake; }
large=$(head -c 300000 /dev/zero | tr '\0' x); lines=$'a\n\nb\n'; odd=$'\x01\xff\x80'; IFS=x
"""
_HOSTILE_TELL = (
    'echo ${#large} "$lines" $(printf %s "$odd" | od -An -tx1); cd /; declare; builtin; command; printf %q "$IFS"'
)


_SERVE = "python3 -m http.server 8099 >/dev/null 2>&1 &"
_CONNECT = "for try in {1..1000}; do (exec 3<>/dev/tcp/127.0.0.1/8099) 2>/dev/null && break; sleep 0.05; done"


def _expect(condition: bool, message: object) -> None:
    if not condition:
        raise AssertionError(str(message))


async def _twins_start_with_the_same_files(box: Sandbox, home: str) -> None:
    await box.exec(
        "mkdir -p repo/src; echo 1 > repo/src/a; chmod 700 repo/src/a; rm -rf /srv; echo etc > /etc/new; echo t >/tmp/t"
    )
    async with box.fork() as twin:
        result = await twin.exec("cat repo/src/a /etc/new /tmp/t; stat -c %a repo/src/a; ls -d /srv 2>/dev/null; pwd")
        _expect(result.output == f"1\netc\nt\n700\n{home}\n", result)
        await twin.exec("mv repo/src repo/lib && echo 2 > repo/lib/a && rm /etc/new")
        async with twin.fork() as third:
            result = await third.exec("ls repo; cat repo/lib/a; ls /etc/new 2>/dev/null")
            _expect(result.output == "lib\n2\n", result)
    result = await box.exec("cat repo/src/a /etc/new")
    _expect(result.output == "1\netc\n", f"the twin changed the original: {result}")


async def _a_fork_carries_the_session(box: Sandbox, home: str) -> None:
    await box.exec(_SESSION)
    async with box.fork() as twin:
        there, here = await twin.exec(_TELL), await box.exec(_TELL)
    _expect(there.output == here.output, f"the twin says\n{there.output}\nand the original\n{here.output}")
    _expect(there.output.startswith('1 s e"c u b c 1 5 2 two words\nsaid it\n'), there.output)
    _expect(f"0027\n{home}/work\n" in there.output and "fffe20" in there.output, there.output)


async def _a_hostile_session_is_carried(box: Sandbox, _home: str) -> None:
    await box.exec(_HOSTILE)
    async with box.fork() as twin:
        there, here = await twin.exec(_HOSTILE_TELL), await box.exec(_HOSTILE_TELL)
    _expect(there.output == here.output, f"the twin says\n{there.output}\nand the original\n{here.output}")
    _expect(there.output.startswith("300000 a\n\nb\n") and there.output.count("fake\n") == 4, there.output)


async def _a_snapshot_changes_nothing(box: Sandbox, home: str) -> None:
    await box.exec("mkdir d; cd d; f() { echo f $v; }; v=1; echo m > /dev/shm/m; echo 1 > a")
    before = await box.exec("echo $$; f; pwd; cat a /dev/shm/m; echo $!")
    for shell in (True, False):
        await box.snapshot(shell=shell)
    after = await box.exec("echo $$; f; pwd; cat a /dev/shm/m; echo $!; echo 2 > a; cat ../d/a")
    _expect(after.output == before.output + "2\n" and not after.session_restarted, (before, after))
    _expect(await box.read_file(f"{home}/d/a") == b"2\n", "file operations see another root than the shell")


async def _memory_files_travel_with_the_session(box: Sandbox, _home: str) -> None:
    await box.exec("mkdir /run/service; echo 1 > /run/service/state; echo 2 > /dev/shm/two")
    async with box.fork() as twin:
        result = await twin.exec("cat /run/service/state /dev/shm/two")
        _expect(result.output == "1\n2\n", result)


async def _secrets_stay_without_the_session(box: Sandbox, home: str) -> None:
    await box.exec("mkdir d && cd d; export SECRET=s; f() { echo f; }; sleep 60 & exec 5>held")
    async with box.fork(shell=False) as twin:
        result = await twin.exec("echo ${SECRET-none}; f 2>/dev/null || echo none; pwd; ls; ps -e | grep -c sleep")
        _expect(result.output == f"none\nnone\n{home}\nd\n0\n", result)


async def _what_cannot_be_carried_is_named(box: Sandbox, _home: str) -> None:
    await box.exec("mkdir d; sleep 61 & exec 5>held; export A=1; until ps -e | grep -q sleep; do :; done")
    for attempt in (box.snapshot, box.fork(drop=False).__aenter__):
        try:
            await attempt()
        except NotCarried as error:
            text = str(error.items)
            _expect("sleep 61" in text and "descriptor 5" in text and len(error.items) == 2, text)
        else:
            raise AssertionError("a background job and a descriptor were dropped silently")
    async with box.fork(drop=True) as twin:
        result = await twin.exec("echo $A; ps -e | grep -c sleep; { echo x >&5; } 2>/dev/null || echo closed")
        _expect(result.output == "1\n0\nclosed\n", result)
    result = await box.exec("jobs -r | grep -c sleep; echo x >&5; cat held")
    _expect(result.output == "1\nx\n", f"the original lost something: {result}")
    await box.exec("echo a; sleep 60", soft_timeout=0.2)
    try:
        await box.snapshot()
    except NotCarried as error:
        _expect("a running command" in error.items, error.items)
    else:
        raise AssertionError("a running command was dropped silently")


async def _siblings_differ(box: Sandbox, _home: str) -> None:
    await box.exec("RANDOM=7; echo $RANDOM > /dev/null")
    tell = (
        "echo $RANDOM$RANDOM; mktemp -u; head -c 8 /dev/urandom | od -An -tx8; cat /proc/sys/kernel/random/uuid; "
        "command -v python3 >/dev/null && python3 -c 'import random; print(random.random())'"
    )
    async with AsyncExitStack() as stack:
        twins = [await stack.enter_async_context(box.fork()) for _number in range(3)]
        told = [(await each.exec(tell)).output.split() for each in (box, *twins)]
    for values in zip(*told, strict=True):
        _expect(len(set(values)) == len(told), f"siblings agree: {values}")


async def _siblings_do_not_meet(box: Sandbox, home: str) -> None:
    await box.exec("echo parent > file; mkdir d")
    async with AsyncExitStack() as stack:
        twins = [await stack.enter_async_context(box.fork()) for _number in range(2)]
        for number, each in enumerate((box, *twins)):
            await each.exec(f"echo {number} > file; touch d/{number}; {_SERVE}")
        for number, each in enumerate((box, *twins)):
            _expect(await each.read_file(f"{home}/file") == b"%d\n" % number, "a sibling's write is visible")
            result = await each.exec(f"{_CONNECT}; ls d; kill -0 $! && ps -e | grep -c python")
            wanted = f"{number}\n1\n"
            _expect(result.output == wanted, f"a sibling's file or process is seen, or ports clash: {result}")


async def _a_rollback_restores_files_and_session(box: Sandbox, home: str) -> None:
    await box.exec("mkdir d; cd d; echo 1 > a; export A=1; f() { echo f; }; v=1")
    snapshot = await box.snapshot()
    await box.exec("echo 2 > a; rm -rf /srv; mkdir /new; echo x > /dev/shm/x; cd /; unset A v; unset -f f; sleep 60 &")
    await box.exec("until ps -e | grep -q sleep; do :; done")
    try:
        await box.rollback(snapshot)
    except NotCarried as error:
        _expect("sleep 60" in str(error.items), error.items)
    else:
        raise AssertionError("a background job was ended silently")
    for _again in range(2):
        await box.rollback(snapshot, drop=True)
        result = await box.exec(
            "pwd; cat a; echo $A $v; f; ls -d /srv /dev/shm/x /new 2>/dev/null; ps -e | grep -c sleep"
        )
        _expect(result.output == f"{home}/d\n1\n1 1\nf\n/srv\n0\n" and not result.session_restarted, result)
        await box.exec("echo 3 > a; v=3")


FORKS: tuple[Check, ...] = (
    _twins_start_with_the_same_files,
    _a_fork_carries_the_session,
    _a_hostile_session_is_carried,
    _a_snapshot_changes_nothing,
    _memory_files_travel_with_the_session,
    _secrets_stay_without_the_session,
    _what_cannot_be_carried_is_named,
    _siblings_differ,
    _siblings_do_not_meet,
    _a_rollback_restores_files_and_session,
)
