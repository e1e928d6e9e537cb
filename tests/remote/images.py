"""Small container images made of what this machine has: no registry, no mirror, no network.

`write_debian` collects this machine's shell, tools, git and Python with the libraries that they load; `write_busybox`
needs one static binary and has neither bash nor Python nor a dynamic loader. Both write a tar of a root file system.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

DEBIAN, BUSYBOX = "skyenv-test/debian:4", "skyenv-test/busybox:3"
"""What they are called in an engine."""
SHELLS = ("bash", "sh", "su", "script", "setsid", "login", "getopt", "ssh")
COREUTILS = (
    "[", "b2sum", "base64", "basename", "cat", "chgrp", "chmod", "chown", "cksum", "comm", "cp", "csplit", "cut",
    "date", "dd", "df", "dirname", "du", "echo", "env", "expand", "expr", "false", "fmt", "fold", "groups", "head",
    "hostname", "id", "install", "join", "ln", "ls", "md5sum", "mkdir", "mkfifo", "mknod", "mktemp", "mv", "nice",
    "nl", "nohup", "nproc", "od", "paste", "printenv", "printf", "pwd", "readlink", "realpath", "rm", "rmdir", "seq",
    "sha256sum", "shuf", "sleep", "sort", "split", "stat", "stdbuf", "stty", "sync", "tac", "tail", "tee", "test",
    "timeout", "touch", "tr", "true", "truncate", "tsort", "tty", "uname", "unexpand", "uniq", "wc", "whoami", "yes",
    "chroot",
)  # fmt: skip
TOOLS = (
    "awk", "cmp", "diff", "egrep", "find", "free", "getent", "git", "grep", "gzip", "less", "ldd", "more", "mount",
    "patch", "pgrep", "pkill", "ps", "sed", "tar", "tmux", "top", "tput", "unshare", "xargs",
)  # fmt: skip
TREES = ("/etc/pam.d", "/etc/security", "/lib/terminfo", "/usr/share/git-core/templates", "/usr/lib/locale/C.utf8")
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "etc/shadow": "root:*:19700:0:99999:7:::\nuser:*:19700:0:99999:7:::\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
}
FOLDERS = ("dev", "etc", "home/user", "proc", "root", "run", "srv", "sys", "tmp", "usr/sbin", "var/tmp")
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "turtledemo", "ensurepip"}


class Root:
    """A tar of a root file system that grows by host files, each at the path that it has here. Entries once only."""

    def __init__(self, out: Path) -> None:
        self._tar = tarfile.open(out, "w")  # noqa: SIM115
        self._known: set[str] = set()

    def __enter__(self) -> Root:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._tar.close()

    def _fresh(self, name: str) -> bool:
        fresh = name not in self._known
        self._known.add(name)
        if fresh and "/" in name:
            self.folder(name.rpartition("/")[0])
        return fresh

    def folder(self, name: str, mode: int = 0o755) -> None:
        """An empty directory."""
        if self._fresh(name):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, mode
            self._tar.addfile(member)

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        if self._fresh(name):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            self._tar.addfile(member)

    def text(self, name: str, text: str, mode: int = 0o644) -> None:
        """A file with this text."""
        if self._fresh(name):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text.encode()), mode
            self._tar.addfile(member, io.BytesIO(text.encode()))

    def file(self, source: Path, name: str | None = None) -> None:
        """A host file, at its own resolved path unless `name` is given."""
        real = source.resolve()
        inside = name or str(real)[1:]
        if self._fresh(inside):
            member = self._tar.gettarinfo(real, inside)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            with real.open("rb") as content:
                self._tar.addfile(member, content)
        if name is None and str(source)[1:] != inside:
            self.link(str(source.parent.resolve() / source.name)[1:], str(real))

    def program(self, path: Path) -> None:
        """A host program or shared object, with all that it loads."""
        self.file(path)
        for library in libraries(path.resolve()):
            self.file(library)


@functools.cache
def libraries(path: Path) -> tuple[Path, ...]:
    """What the dynamic loader loads for a program; nothing for a script or a static one."""
    listing = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False).stdout
    words = (word for line in listing.splitlines() for word in line.split())
    return tuple(Path(word) for word in words if word.startswith("/"))


def _merged_usr(root: Root) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            root.folder(f"usr/{name}")
            root.link(name, f"usr/{name}")


def _basics(root: Root) -> None:
    for name in FOLDERS:
        root.folder(name, 0o1777 if name.endswith("tmp") else 0o755)
    for name, text in FILES.items():
        root.text(name, text)


def _walk(top: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(top):
        names[:] = [name for name in names if name not in LEFT_OUT and not name.startswith("config-")]
        yield from (Path(folder, name) for name in files)


def _add_python(root: Root) -> None:
    interpreter = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    root.program(interpreter)
    for path in _walk(Path(sys.base_prefix, "lib", interpreter.name)):
        if path.suffix == ".so":
            root.program(path)
        elif not path.name.endswith((".opt-1.pyc", ".opt-2.pyc", ".a")):
            root.file(path)
    for name in ("python3", "python"):
        root.link(f"usr/local/bin/{name}", str(interpreter))


def write_debian(out: Path) -> None:
    """A root file system with bash, the usual tools, git and Python; some 60 MB."""
    with Root(out) as root:
        write_base(root, (*SHELLS, *COREUTILS, *TOOLS))


def write_base(root: Root, programs: Iterable[str]) -> None:
    """Programs, accounts and Python."""
    _merged_usr(root)
    _basics(root)
    for path in _programs(programs):
        root.program(path)
    for tree in TREES:
        for path in _walk(Path(tree)):
            root.file(path)
    for module in Path("/lib").glob("*/security/pam_*.so"):
        root.program(module)
    _add_python(root)


def _programs(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        found = shutil.which(name)
        if found is not None:
            yield Path(found)


def write_busybox(out: Path) -> None:
    """A root file system of one static binary: `sh`, no bash, no dynamic loader."""
    binary = shutil.which("busybox")
    if binary is None:
        raise FileNotFoundError("busybox: install busybox-static")
    applets = subprocess.run([binary, "--list"], capture_output=True, text=True, check=True).stdout.split()
    with Root(out) as root:
        _basics(root)
        root.file(Path(binary), "bin/busybox")
        for applet in applets:
            root.link(f"bin/{applet}", "/bin/busybox")


def write_tiny(out: Path, *members: tarfile.TarInfo) -> None:
    """A root file system of these empty members."""
    with tarfile.open(out, "w") as tar:
        for member in members:
            tar.addfile(member)
