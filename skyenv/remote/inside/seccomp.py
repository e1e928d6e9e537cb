"""A filter on system calls that sandboxed programs do not need and that have been ways out before.

Capabilities and namespaces already refuse most of them; this closes the door in front of the kernel's code. Refused
calls fail with EPERM, as do all calls of a foreign architecture and a `clone` into new namespaces. `clone3`, whose
flags a filter cannot see, does not exist here, so that libraries use `clone`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from . import kernel

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ENDS = {"allow": 0x7FFF0000, "refuse": 0x00050000 | errno.EPERM, "missing": 0x00050000 | errno.ENOSYS}
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NAMESPACES = 0x7E020000
_CLONE, _CLONE3 = (56, 220), 435
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
    refused = sorted(pair[column] for pair in _REFUSED.values())
    program = [
        (_LOAD, _ARCHITECTURE, "", ""),
        (_EQUAL, architecture, "", "refuse"),
        (_LOAD, _NUMBER, "", ""),
        (_AT_LEAST, _X32, "refuse", ""),
        (_EQUAL, _CLONE3, "missing", ""),
        *((_EQUAL, number, "refuse", "") for number in refused),
        (_EQUAL, _CLONE[column], "", "allow"),
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        (_ANY_BIT, _NAMESPACES, "refuse", "allow"),
    ]
    code = _assemble(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    kernel.set_seccomp_filter(header)


def _assemble(program: list[tuple[int, int, str, str]]) -> bytes:
    """Steps (operation, value, where to go if so, and if not; "" is the next step), then the ends."""
    place = {name: len(program) + index for index, name in enumerate(_ENDS)}
    steps = [
        (operation, *(place[name] - here - 1 if name else 0 for name in targets), value)
        for here, (operation, value, *targets) in enumerate(program)
    ]
    steps += [(_RETURN, 0, 0, value) for value in _ENDS.values()]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
