"""An init for containers that nobody can enter: this interpreter, its loader and libraries, and the code of
`skyenv.remote.inside`, in one directory that runs wherever it lies and whatever the image holds.

The directory is found at run time at `HOME` (mounted or copied there, read-only) and needs nothing of the image: not
Python, not its C library, not a shell. Two builds from the same interpreter and code are the same, byte for byte.
"""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from skyenv.errors import ConfigError

HOME = "/.skyenv"
ENTRIES = ("keeper", "prepare", "relay", "tree")
_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.{module} import main; main()"
_LIST = (
    "import sys, json; sys.path.insert(0, sys.argv[1]); known = set(sys.modules)\n"
    "import inside.{0}, inside.{1}, inside.{2}, inside.{3}, encodings.ascii, encodings.latin_1, encodings.utf_8\n"
    "modules = [m for m in list(sys.modules.values()) if type(m) is type(sys) and m.__spec__]\n"
    "print(json.dumps([[m.__name__, m.__spec__.origin] for m in modules]))"
)
_FLAGS = ("-I", "-S", "-B", "-X", "utf8")
_INTERP = 3


def python(home: str = HOME) -> list[str]:
    """How to run the interpreter from the directory that lies at `home`."""
    return [f"{home}/lib/loader", "--inhibit-cache", "--library-path", f"{home}/lib", f"{home}/bin/python3", *_FLAGS]


def command(module: str, *arguments: str, home: str = HOME) -> list[str]:
    """How to run one of the `ENTRIES` from the directory that lies at `home`."""
    return [*python(home), "-c", _CODE.format(module=module), f"{home}/code", *arguments]


def build(target: Path) -> None:
    """Make the directory `target`. ConfigError when this interpreter cannot be copied (not Linux, not dynamic)."""
    program = Path(os.path.realpath(sys.executable))
    loader = _loader(program)
    modules = _modules(program)
    extensions = [Path(path) for _name, path in modules if path.endswith(".so")]
    target.mkdir(parents=True)
    _copy(program, target / "bin/python3", 0o755)
    _copy(loader, target / "lib/loader", 0o755)
    for library, place in sorted(_libraries(loader, [program, *extensions]).items()):
        _copy(place, target / "lib" / library, 0o644)
    standard = target / f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    (standard / "lib-dynload").mkdir(parents=True)
    for name, path in modules:
        if path.endswith(".so"):
            _copy(Path(path), standard / "lib-dynload" / Path(path).name, 0o644)
        elif not name.startswith("inside"):
            _compile(Path(path), standard / _place(name, path), f"<{name}>")
    for source in sorted((Path(__file__).parent / "inside").glob("*.py")):
        _compile(source, target / "code/inside" / source.name, f"inside/{source.name}")


def size(target: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def _place(name: str, path: str) -> str:
    parts = name.replace(".", "/")
    return f"{parts}/__init__.py" if Path(path).name == "__init__.py" else f"{parts}.py"


def _modules(program: Path) -> list[tuple[str, str]]:
    """Name and file of every module that the code inside imports, `os` (by which Python finds its home) included."""
    code, folder = _LIST.format(*ENTRIES), str(Path(__file__).parent)
    answer = subprocess.run([program, *_FLAGS, "-c", code, folder], capture_output=True, check=False)
    if answer.returncode:
        raise ConfigError(f"{program} cannot run the code of a sandbox: {answer.stderr.decode()[-500:]}")
    found: list[list[str | None]] = json.loads(answer.stdout)
    library = Path(os.__file__).parent
    modules = {str(name): _file(str(name), origin, library) for name, origin in found}
    return sorted((name, path) for name, path in modules.items() if path)


def _file(name: str, origin: str | None, library: Path) -> str:
    """Where the source of a module is; also of one that is frozen into the interpreter. Empty for a built-in one."""
    if origin != "frozen":
        return origin if origin and origin.startswith("/") else ""
    for candidate in (library / f"{name.replace('.', '/')}.py", library / name.replace(".", "/") / "__init__.py"):
        if candidate.exists():
            return str(candidate)
    return ""


def _loader(program: Path) -> Path:
    """The dynamic loader that an ELF program names."""
    data = program.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        raise ConfigError(f"{program} is no 64-bit ELF program, so it cannot be made portable")
    order = "<" if data[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", data, 32)
    entry, count = struct.unpack_from(f"{order}HH", data, 54)
    for number in range(count):
        at = offset + number * entry
        if struct.unpack_from(f"{order}I", data, at)[0] == _INTERP:
            start, length = (struct.unpack_from(f"{order}Q", data, at + field)[0] for field in (8, 32))
            return Path(data[start : start + length].rstrip(b"\0").decode()).resolve()
    raise ConfigError(f"{program} is linked statically, so it has no loader that could be copied")


def _libraries(loader: Path, programs: list[Path]) -> dict[str, Path]:
    """Every shared library that the programs need, by the name under which they ask for it."""
    found = {}
    for program in programs:
        listing = subprocess.run([loader, "--list", program], capture_output=True, text=True, check=True).stdout
        for line in listing.splitlines():
            name, arrow, place = line.strip().partition(" => ")
            if arrow and place.startswith("/") and Path(name).name != loader.name:
                found[Path(name).name] = Path(place.rpartition(" (")[0])
    return found


def _copy(source: Path, target: Path, mode: int) -> None:
    """A copy without debugging symbols, where `strip` exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source.resolve(), target)
    strip = shutil.which("strip")
    if strip is not None and target.name != "loader":
        subprocess.run([strip, "--strip-unneeded", target], capture_output=True, check=False)
    target.chmod(mode)


def main() -> None:
    """Entry point: build the directory that the only argument names."""
    build(Path(sys.argv[1]))


def _compile(source: Path, target: Path, shown: str) -> None:
    """The source, and beside it byte code that is used without a look at the source's time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)
    cache = target.parent / "__pycache__" / f"{target.stem}.{sys.implementation.cache_tag}.pyc"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(target), str(cache), dfile=shown, doraise=True, invalidation_mode=mode)
    cache.chmod(0o644)


if __name__ == "__main__":
    main()
