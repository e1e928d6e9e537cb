"""A filter on system calls that sandboxed programs do not need and that have been ways out before.

Capabilities and namespaces already refuse most of them; this closes the door in front of the kernel's code. Refused
calls fail with EPERM, as do all calls of a foreign architecture.
"""

from __future__ import annotations

import ctypes
import os
import struct

from . import kernel

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1
_X32 = 0x40000000
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# name: (x86_64, aarch64)
_REFUSED = {
    "add_key": (248, 217), "bpf": (321, 280), "delete_module": (176, 106), "finit_module": (313, 273),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "open_by_handle_at": (304, 265), "perf_event_open": (298, 241), "quotactl": (179, 60), "reboot": (169, 142),
    "request_key": (249, 218), "setns": (308, 268), "swapoff": (168, 225), "swapon": (167, 224),
    "unshare": (272, 97), "userfaultfd": (323, 282), "vmsplice": (278, 75),
}  # fmt: skip


def refuse_dangerous_calls() -> None:
    """Install the filter for this process and everything that it starts. Needs no_new_privs. OSError on failure."""
    known = _ARCHITECTURES.get(os.uname().machine)
    if known is None:
        return
    architecture, column = known
    numbers = sorted(pair[column] for pair in _REFUSED.values())
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 0, len(numbers) + 3, architecture), (_LOAD, 0, 0, 0)]
    program.append((_AT_LEAST, len(numbers) + 1, 0, _X32))
    program += [(_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    kernel.set_seccomp_filter(header)
