"""The lowest layer of every local sandbox's root: empty directories, links and a small generated /etc.

What a sandbox sees of the host is decided here: system directories (`system_binds`), the interpreter's own prefix if
it lies elsewhere, and the public parts of /etc named below. Never home directories, keys, sockets or other sandboxes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Public, and too many links to copy for each node.
BOUND_ETC = ("/etc/alternatives", "/etc/ssl/certs")
DIRECTORIES = (
    "dev", "etc", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "var/cache",
    "var/lib", "var/log", "var/tmp", "var/spool", "usr/local",
)  # fmt: skip
# Public configuration that programs need in order to start; nothing with a secret in it.
ETC = (
    "bash.bashrc", "ca-certificates", "ca-certificates.conf", "debian_version", "environment",
    "fonts", "groff", "host.conf", "inputrc", "java-17-openjdk", "java-21-openjdk", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "login.defs", "lsb-release", "magic", "magic.mime", "mime.types", "nanorc",
    "os-release", "pam.d", "perl", "pki/ca-trust", "pki/tls/certs", "pki/tls/cert.pem", "profile", "profile.d",
    "protocols", "python3", "python3.9", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14",
    "redhat-release", "rpc", "security", "services", "shells", "skel", "ssl/openssl.cnf", "terminfo",
    "timezone", "vim", "xattr.conf",
)  # fmt: skip
GENERATED = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
        "bin:x:2:2:bin:/bin:/usr/sbin/nologin\nmail:x:8:8:mail:/var/mail:/usr/sbin/nologin\n"
        "user:x:1000:1000:user:/home/user:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": (
        "root:x:0:\ndaemon:x:1:\nbin:x:2:\nadm:x:4:\ntty:x:5:\nmail:x:8:\nstaff:x:50:\nuser:x:1000:\nnogroup:x:65534:\n"
    ),
    "shadow": "root:*:19700:0:99999:7:::\nuser:*:19700:0:99999:7:::\nnobody:*:19700:0:99999:7:::\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    "resolv.conf": "",
    # Takes the place of nsswitch.conf in sandboxes that have a network.
    "nsswitch.network": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\n",
    "fstab": "",
}


def system_binds(reader: int | None, *, mounted_by_root: bool) -> list[str]:
    """The host's directories that a sandbox sees, read-only, as far as host user `reader` (None: we) can read them."""
    binds = [path for path in (*SYSTEM, *BOUND_ETC) if Path(path).is_dir() and not Path(path).is_symlink()]
    prefix = interpreter_prefix()
    if prefix and _can_enter(Path(prefix), reader, parents=not mounted_by_root):
        binds.append(prefix)
    return binds


def interpreter_prefix() -> str | None:
    """Where the interpreter that runs this is installed, if that is outside the system directories."""
    prefix = os.path.realpath(sys.base_prefix)
    inside = any(prefix == path or prefix.startswith(path + "/") for path in SYSTEM)
    return None if inside or prefix == "/" else prefix


def _can_enter(path: Path, reader: int | None, *, parents: bool) -> bool:
    if reader is None:
        return os.access(path, os.R_OK | os.X_OK)
    for folder in (path, *path.parents) if parents else (path,):
        found = folder.stat()
        if not found.st_mode & (0o100 if found.st_uid == reader else 0o001):
            return False
    return True


def search_path(binds: Sequence[str]) -> str:
    """The sandbox's PATH; the interpreter's own prefix comes first."""
    standard = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    extra = [f"{path}/bin" for path in binds if path not in (*SYSTEM, *BOUND_ETC)]
    return ":".join(["/root/.local/bin", *extra, standard])


def build_directories(target: Path, binds: Sequence[str]) -> None:
    """Only the directories and links that mounts need."""
    for name in DIRECTORIES:
        (target / name).mkdir(parents=True, exist_ok=True)
    for path in SYSTEM:
        if Path(path).is_symlink():
            (target / path[1:]).symlink_to(Path(path).readlink())
    for path in binds:
        (target / path[1:]).mkdir(parents=True, exist_ok=True)


def build(target: Path, binds: Sequence[str], owner: int | None) -> None:
    """Write the skeleton into the missing directory `target`; everything belongs to `owner` (None: us)."""
    build_directories(target, binds)
    for name in ("tmp", "var/tmp"):
        (target / name).chmod(0o1777)
    (target / "home/user").mkdir()
    for name in ("var/run", "var/lock"):
        (target / name).symlink_to("/run")
    for name in ETC:
        _copy(Path("/etc") / name, target / "etc" / name)
    for name, text in GENERATED.items():
        (target / "etc" / name).write_text(text)
    (target / "etc/mtab").symlink_to("/proc/self/mounts")
    if owner is not None:
        _own(target, owner)


def _copy(source: Path, target: Path) -> None:
    """Copy what everybody on the host may read; links stay links."""
    with contextlib.suppress(OSError):
        if source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.readlink())
        elif source.is_dir() and source.stat().st_mode & 0o005 == 0o005:
            target.mkdir(parents=True, exist_ok=True)
            for entry in source.iterdir():
                _copy(entry, target / entry.name)
        elif source.is_file() and source.stat().st_mode & 0o004:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _own(target: Path, owner: int) -> None:
    for folder, _names, files in os.walk(target):
        os.chown(folder, owner, owner, follow_symlinks=False)
        for name in (*files, *(n for n in _names if Path(folder, n).is_symlink())):
            os.chown(Path(folder, name), owner, owner, follow_symlinks=False)
    (target / "home/user").chmod(0o777)
