"""The few system calls that Python does not offer: namespaces, mounts, capabilities. OSError on failure."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 15, 22, 24
PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 38, 36

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot
KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 10, 18)
_SYS_MOUNT_SETATTR = 442
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags`."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def enter(pidfd: int, flags: int) -> None:
    """Join the namespaces named by `flags` of the process behind `pidfd`, all of them or none."""
    _check(_libc.setns(ctypes.c_int(pidfd), ctypes.c_int(flags)), f"setns({flags:#x})")


def prctl(option: int, value: int, third: int = 0) -> None:
    """Operate on this process, with integer arguments."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), zero, zero), f"prctl({option})")


def rename_process(name: str) -> None:
    """Be listed as `name` only: the command line names paths of the host, and looks like a Python program's."""
    _check(_libc.prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0), "prctl(PR_SET_NAME)")
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    if end - start > len(name):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name.encode(), len(name.encode()))


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    """Attach a file system."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        os.fsencode(data) if data else None,
    )
    _check(result, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Detach a file system, now or once nobody uses it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def leave_mount_namespace() -> None:
    """Have mounts of our own that nobody else sees."""
    unshare(NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def bind(source: str, target: str) -> None:
    """Show `source` at `target` too, with everything mounted below it."""
    mount(source, target, None, MS_BIND | MS_REC)


def restrict_mount(target: str, attributes: int, *, below: bool = True) -> None:
    """Set mount attributes (read-only, nosuid, nodev) on `target` and, unless not `below`, all mounted below it."""
    request = struct.pack("QQQQ", attributes, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_AT_RECURSIVE if below else 0),
        ctypes.c_char_p(request),
        ctypes.c_size_t(len(request)),
    )
    _check(result, f"mount_setattr {target}")


def pivot_into(root: str) -> None:
    """Make the mount point `root` the root of this mount namespace and let go of the old one."""
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def raise_loopback() -> None:
    """Bring `lo` up in the current network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def drop_capabilities() -> None:
    """Keep only `KEPT_CAPABILITIES`, in the bounding set and everywhere else, for good."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        if capability not in KEPT_CAPABILITIES:
            prctl(PR_CAPBSET_DROP, capability)
    mask = sum(1 << capability for capability in KEPT_CAPABILITIES)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", 0x20080522, 0)
    data = struct.pack("IIIIII", low, low, 0, high, high, 0)
    _check(_libc.capset(header, data), "capset")


def close_all_but(*keep: int) -> None:
    """Close every descriptor from 3 up that is not in `keep`."""
    start = 3
    for fd in sorted(keep):
        os.closerange(start, fd)
        start = max(start, fd + 1)
    os.closerange(start, 1 << 16)


def set_seccomp_filter(program: bytes) -> None:
    """Install a BPF program (a packed `sock_fprog`) as a filter of system calls."""
    mode_filter, zero = ctypes.c_ulong(2), ctypes.c_ulong(0)
    _check(_libc.prctl(PR_SET_SECCOMP, mode_filter, ctypes.c_char_p(program), zero, zero), "seccomp")


def hide_and_die_with(parent_death_signal: int) -> None:
    """Make this process unreadable for its own sandbox, and let it end when its parent does."""
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, parent_death_signal)


def become_user(uid: int | None) -> None:
    """Give up root for good; None stays who we are."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        prctl(PR_SET_DUMPABLE, 1)
