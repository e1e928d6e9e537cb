"""Searches the files of a tree for a pattern, with what the sandbox has: find and grep, or else the files alone.

No text of the model is ever part of a command: pattern, path and filter are files that a fixed script reads. Files
are searched in bytewise order of their paths, so that equal trees give equal answers.
"""

from __future__ import annotations

import errno
import fnmatch
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from skyenv.core import Sandbox
from skyenv.errors import EnvError, SandboxPathError
from skyenv.tools.output import clean
from skyenv.types import ToolSpec

_DIR = "/tmp/.skyenv_search"
_MAX_LINE = 300
_MAX_FILES = 2_000
_MAX_FILE_BYTES = 1 << 20
_SPECIAL = frozenset(".^$*+?()[]{}|\\")
_NO_GREP, _BAD_PATTERN = 87, 88

# Options that only some greps have are tried first: -I (no binary files), -P (Perl's syntax, else extended).
_SCRIPT = f"""\
cd {_DIR} || exit
for need in find sort xargs grep head; do command -v "$need" >/dev/null 2>&1 || exit {_NO_GREP}; done
LC_ALL=C; export LC_ALL; unset GREP_OPTIONS GREP_COLORS GREP_COLOR
root=$(cat root; echo x) && root=${{root%x}}
name=$(cat name; echo x) && name=${{name%x}}
options=$(cat options)
grep -I x /dev/null >/dev/null 2>&1; [ $? -le 1 ] && options="$options -I"
syntax=-E; grep -P x /dev/null >/dev/null 2>&1; [ $? -le 1 ] && syntax=-P
grep $syntax -f pattern /dev/null; [ $? -le 1 ] || exit {_BAD_PATTERN}
skip="-name .git -o -path {_DIR} -o -path /proc -o -path /sys"
{{ find "$root" \\( $skip \\) -prune -o -type f $(cat test) "$name" -print0 \\
  | sort -z | xargs -0 grep -Hn $options $syntax -f pattern --; }} 2>errors | head -c 400000
"""


class Search:
    """`search(pattern, path, glob, ignore_case, context, max_results)`.

    `workdir` is searched when no path is given; `max_chars` bounds what one call shows; `timeout` in seconds.
    """

    def __init__(self, *, workdir: str = "/", max_chars: int = 16_000, timeout: float = 60.0) -> None:
        self._workdir = workdir
        self._max_chars = max_chars
        self._timeout = timeout
        self.spec = ToolSpec("search", _DESCRIPTION, _PARAMETERS)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Search; the text begins with `ERROR:` when nothing was searched."""
        pattern, glob = arguments["pattern"], arguments.get("glob", "*")
        context, limit = arguments.get("context", 0), arguments.get("max_results", 100)
        if not pattern or "\n" in pattern or "\0" in pattern + glob + arguments.get("path", ""):
            return "ERROR: pattern must be one line and not empty, and nothing may contain a NUL character."
        if not 0 <= context <= 20 or not 1 <= limit <= 1000 or not glob:
            return "ERROR: context must be in [0, 20], max_results in [1, 1000], and glob not empty."
        root = posixpath.normpath(posixpath.join(self._workdir, arguments.get("path", ".")))
        try:
            await sandbox.stat(root)
            fold = arguments.get("ignore_case", False)
            return await self._grep(sandbox, root, glob, pattern, f"-C {context} " * (context > 0) + "-i" * fold, limit)
        except SandboxPathError as error:
            reason = "no such file or directory" if error.errno == errno.ENOENT else "cannot be searched"
            return f"ERROR: {root[:200]}: {reason}."
        except EnvError:
            return "ERROR: a command is still running in the shell. Wait for it or interrupt it, then search."

    async def _grep(self, sandbox: Sandbox, root: str, glob: str, pattern: str, options: str, limit: int) -> str:
        under = "-path" if "/" in glob else "-name"
        name = f"*/{glob.lstrip('/')}" if "/" in glob else glob
        request = {"root": root, "name": name, "pattern": pattern + "\n", "options": options, "test": under}
        for file, text in {**request, "search.sh": _SCRIPT}.items():
            await sandbox.write_file(f"{_DIR}/{file}", text.encode())
        result = await sandbox.exec(f"/bin/sh {_DIR}/search.sh", timeout=self._timeout)
        if result.exit_code in (_NO_GREP, 126, 127):
            return await self._plain(sandbox, root, name, pattern, limit)
        if result.exit_code == _BAD_PATTERN:
            return (
                f"ERROR: the pattern is not a regular expression that grep takes: {clean(result.output).strip()[:300]}"
            )
        if result.timed_out:
            return f"ERROR: the search took longer than {self._timeout:g} seconds. Search a smaller tree."
        shown = self._show(clean(result.output).splitlines(), limit, "-C" in options)
        errors = (await sandbox.read_file(f"{_DIR}/errors", max_bytes=4096)).decode(errors="replace").splitlines()
        told = [line for line in map(clean, errors) if line.strip() and "roken pipe" not in line]
        return f"{shown}\n[Not everything could be searched: {told[0][:200]}]" if told else shown

    async def _plain(self, sandbox: Sandbox, root: str, name: str, pattern: str, limit: int) -> str:
        """Look for a plain text without any program inside the sandbox."""
        if _SPECIAL & set(pattern):
            return "ERROR: this sandbox has no grep, so only text without regular expression characters can be found."
        entries = [await sandbox.stat(root)]
        if entries[0].kind == "dir":
            entries = await sandbox.list_dir(root, depth=12)
        found: list[str] = []
        for entry in entries[:_MAX_FILES]:
            tested = entry.path if "/" in name else posixpath.basename(entry.path)
            if entry.kind != "file" or "/.git/" in entry.path or not fnmatch.fnmatchcase(tested, name):
                continue
            data = await sandbox.read_file(entry.path, max_bytes=_MAX_FILE_BYTES)
            if b"\0" not in data[:8192]:
                lines = enumerate(data.decode(errors="replace").split("\n"), 1)
                found += [f"{entry.path}:{number}:{line}" for number, line in lines if pattern in line]
            if len(found) > limit:
                break
        note = "\n[This sandbox has no grep; only text as it stands was searched for, context and case left out.]"
        return self._show(found, limit, False) + note

    def _show(self, lines: list[str], limit: int, grouped: bool) -> str:
        if not lines:
            return "No matches."
        kept: list[str] = []
        matches, room = 0, self._max_chars
        for line in lines:
            is_match = not grouped or bool(re.match(r"[^\n]*?:\d+:", line))
            row = line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}... [{len(line) - _MAX_LINE} more characters]"
            room -= len(row) + 1
            if room < 0 or matches + is_match > limit:
                kept.append("[More matches were left out; narrow the pattern, the path or the glob.]")
                break
            matches += is_match
            kept.append(row)
        return "\n".join(kept)


_DESCRIPTION = """\
Search the contents of files below a directory with a regular expression, line by line.
* Shows `path:line:text` for each match, in the order of the paths. Binary files, `.git`, /proc and /sys are left out.
* `glob` limits the files by name, such as `*.py`, or by path when it contains a slash, such as `tests/*.py`.
* `context` also shows so many lines around each match, as `path-line-text`."""

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "pattern": {"type": "string", "description": "Regular expression, matched within one line."},
        "path": {"type": "string", "description": "File or directory to search. Default: the working directory."},
        "glob": {"type": "string", "description": "Which files to search. Default: all."},
        "ignore_case": {"type": "boolean", "description": "Whether case does not matter. Default: false."},
        "context": {"type": "integer", "description": "Lines to show before and after each match. Default: 0."},
        "max_results": {"type": "integer", "description": "How many matches to show at most. Default: 100."},
    },
    "required": ["pattern"],
}
