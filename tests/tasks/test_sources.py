"""Sources and trees: what is read, what is refused, and that patches are exact to the byte."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv.envs.swe import sources, trees
from skyenv.envs.swe.sources import (
    ArchiveSource,
    DirectorySource,
    FilesSource,
    GitSource,
    PypiSource,
    Source,
    Tree,
    TreeFile,
    diff_trees,
    fetch_tree,
    parse_source,
    select,
    tree_to_tar,
)
from skyenv.errors import ConfigError, SourceUnavailable

SHA = "0" * 64


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def make_tar(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


async def fetch(source: Source, tmp_path: Path) -> Tree:
    return await fetch_tree(source, base=tmp_path, cache=tmp_path / "cache")


async def fetch_archive(data: bytes, tmp_path: Path, **fields: Any) -> Tree:
    (tmp_path / "archive").write_bytes(data)
    return await fetch(ArchiveSource("archive", **fields), tmp_path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
async def test_tar_of_every_compression(tmp_path: Path, mode: str) -> None:
    data = make_tar(
        member("./pkg/a.py", b"a\r\n"), member("pkg/run.sh", b"x", mode=0o4711), member("top.txt"), mode=mode
    )
    tree = await fetch_archive(data, tmp_path, sha256=hashlib.sha256(data).hexdigest())
    assert tree == {
        "pkg/a.py": TreeFile(b"a\r\n", 0o644),
        "pkg/run.sh": TreeFile(b"x", 0o755),
        "top.txt": TreeFile(b"", 0o644),
    }
    assert list(await fetch_archive(data, tmp_path, strip=1)) == ["a.py", "run.sh"]


async def test_zip(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/a.py", b"1\n")
        archive.mkdir("top/empty")
        link = zipfile.ZipInfo("top/b.py")
        link.external_attr = trees.SYMLINK << 16
        archive.writestr(link, "a.py")
    tree = await fetch_archive(buffer.getvalue(), tmp_path, strip=1)
    assert tree == {"a.py": TreeFile(b"1\n"), "b.py": TreeFile(b"a.py", trees.SYMLINK)}


async def test_inner_links_are_kept_and_hard_links_copied(tmp_path: Path) -> None:
    data = make_tar(
        member("d/a", b"1"),
        member("d/e/link", type=tarfile.SYMTYPE, linkname="../a"),
        member("d/hard", type=tarfile.LNKTYPE, linkname="d/a"),
    )
    tree = await fetch_archive(data, tmp_path)
    assert tree["d/e/link"] == TreeFile(b"../a", trees.SYMLINK)
    assert tree["d/hard"] == TreeFile(b"1")


HOSTILE = {
    "parent": [member("../evil", b"x")],
    "inner parent": [member("a/../../evil", b"x")],
    "absolute": [member("/etc/evil", b"x")],
    "backslash": [member("a\\..\\evil", b"x")],
    "symlink up": [member("a", type=tarfile.SYMTYPE, linkname="../b")],
    "symlink absolute": [member("a", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "symlink behind a link": [
        member("top/x", b""),
        member("p/q/a", type=tarfile.SYMTYPE, linkname="../../top"),
        member("p/q/b", type=tarfile.SYMTYPE, linkname="a/../.."),
    ],
    "write through link": [member("a", type=tarfile.SYMTYPE, linkname="b"), member("a/x", b"x")],
    "file below file": [member("a", b""), member("a/x", b"x")],
    "hard link to outside": [member("a", type=tarfile.LNKTYPE, linkname="../../etc/passwd")],
    "hard link to nothing": [member("a", type=tarfile.LNKTYPE, linkname="b")],
    "device": [member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "fifo": [member("fifo", type=tarfile.FIFOTYPE)],
    "empty": [member("only/.git/config", b"x")],
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_hostile_tar_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(ConfigError, match="archive archive: "):
        await fetch_archive(make_tar(*HOSTILE[case]), tmp_path)


async def test_truncated_and_foreign_files_are_refused(tmp_path: Path) -> None:
    whole = make_tar(member("a", os.urandom(4000)))
    for data in (whole[:900], whole[:-12] + b"0" * 12, b"PK\3\4 no zip", b"no archive at all" * 99, b""):
        with pytest.raises(ConfigError, match="archive archive: "):
            await fetch_archive(data, tmp_path)


async def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(trees, "MAX_MEMBERS", 10)
    many = make_tar(*(member(f"d/{i}") for i in range(11)))
    huge = make_tar(member("zeros", bytes(2 << 20)))
    header = make_tar(member("a" * (2 << 20), b""))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(2 << 20))
    for data, reason in ((many, "many"), (huge, "large"), (header, "large"), (buffer.getvalue(), "large")):
        with pytest.raises(ConfigError, match=reason):
            await fetch_archive(data, tmp_path)


async def test_archive_digest_and_existence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 000"):
        await fetch_archive(make_tar(member("a", b"1")), tmp_path, sha256=SHA)
    with pytest.raises(ConfigError, match=r"missing\.tar does not exist"):
        await fetch(ArchiveSource("missing.tar"), tmp_path)


async def test_directory(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    (root / "pkg" / "__pycache__").mkdir(parents=True)
    (root / "pkg" / "__pycache__" / "a.pyc").write_bytes(b"")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_bytes(b"")
    (root / "pkg" / ".git").write_bytes(b"gitdir: /elsewhere")
    (root / "pkg" / "a.py").write_bytes(b"1")
    (root / "run").symlink_to("pkg/a.py")
    tree = await fetch(DirectorySource("repo"), tmp_path)
    assert tree == {"pkg/a.py": TreeFile(b"1"), "run": TreeFile(b"pkg/a.py", trees.SYMLINK)}
    (root / "out").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="'out' points out of the tree"):
        await fetch(DirectorySource("repo"), tmp_path)
    (root / "out").unlink()
    os.mkfifo(root / "fifo")
    with pytest.raises(ConfigError, match="'fifo' is neither"):
        await fetch(DirectorySource("repo"), tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        await fetch(DirectorySource("absent"), tmp_path)


async def test_files(tmp_path: Path) -> None:
    tree = await fetch(FilesSource({"b/a.py": b"1\n", "c": b""}), tmp_path)
    assert tree == {"b/a.py": TreeFile(b"1\n"), "c": TreeFile(b"")}
    for path in ("../a", "/a", "a//b", "./a", "", ".git/hooks/pre-commit"):
        with pytest.raises(ConfigError, match="files: "):
            await fetch(FilesSource({path: b""}), tmp_path)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"directory": "repo"}, DirectorySource("repo")),
        ({"archive": {"path": "a.zip"}}, ArchiveSource("a.zip", None, 0)),
        ({"archive": {"path": "a.zip", "sha256": SHA, "strip": 2}}, ArchiveSource("a.zip", SHA, 2)),
        (
            {"pypi": {"name": "a-b", "version": "1.0", "sha256": SHA, "subdir": "src"}},
            PypiSource("a-b", "1.0", SHA, "src"),
        ),
        ({"git": {"url": "https://host/x", "commit": "a" * 40}}, GitSource("https://host/x", "a" * 40)),
        ({"files": {"a": "é"}}, FilesSource({"a": "é".encode()})),
    ],
)
def test_parse_source(value: object, expected: Source) -> None:
    assert parse_source(value, "rows.yaml: t1.source") == expected


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, ""),
        ({}, ""),
        ({"directory": "a", "files": {}}, ""),
        ({"svn": "a"}, ""),
        ({"directory": 3}, ".directory"),
        ({"archive": "a.zip"}, ".archive"),
        ({"archive": {"path": "a", "sha256": "abc"}}, ".archive.sha256"),
        ({"archive": {"path": "a", "strip": -1}}, ".archive.strip"),
        ({"archive": {"path": "a", "extra": 1}}, ".archive: extra"),
        ({"pypi": {"name": "a", "sha256": SHA}}, ".pypi: version"),
        ({"pypi": {"name": "a", "version": 1.0, "sha256": SHA}}, ".pypi.version"),
        ({"pypi": {"name": "a/../b", "version": "1", "sha256": SHA}}, ".pypi.name"),
        ({"pypi": {"name": "a", "version": "1", "sha256": "../" + SHA[3:]}}, ".pypi.sha256"),
        ({"git": {"url": "--upload-pack=evil", "commit": "a" * 40}}, ".git.url"),
        ({"git": {"url": "https://host/x", "commit": "main"}}, ".git.commit"),
        ({"files": {"a": 1}}, ".files"),
        ({"files": {}}, ".files"),
    ],
)
def test_bad_source_names_row_and_field(value: object, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_source(value, "rows.yaml: t1.source")
    assert str(caught.value).startswith(f"rows.yaml: t1.source{field}: ")


def test_select() -> None:
    tree = {"a/b.py": TreeFile(b"1"), "a/c.py": TreeFile(b"2"), "ab": TreeFile(b"3")}
    assert list(select(tree, ["a"])) == ["a/b.py", "a/c.py"]
    assert list(select(tree, ["a/c.py", "ab"])) == ["a/c.py", "ab"]
    with pytest.raises(ConfigError, match="'a/d' matches no file"):
        select(tree, ["ab", "a/d"])


def test_tar_is_deterministic() -> None:
    tree = {"b/" + "x" * 150: TreeFile(b"1", 0o755), "a": TreeFile("ü".encode()), "l": TreeFile(b"a", trees.SYMLINK)}
    assert tree_to_tar(tree) == tree_to_tar(dict(reversed(tree.items())))
    assert trees.read_archive(tree_to_tar(tree), "tar") == tree


def checked_out(tree: Tree, root: Path) -> None:
    root.mkdir()
    with tarfile.open(fileobj=io.BytesIO(tree_to_tar(tree))) as archive:
        archive.extractall(root, filter="tar")


def apply(old: Tree, patch: bytes, root: Path) -> Tree:
    checked_out(old, root)
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    run = partial(subprocess.run, cwd=root, env=environment, check=True, capture_output=True)
    run(["git", "init", "-q"])
    (root / ".git" / "info" / "attributes").write_text("* -text -ident -filter\n")
    run(["git", "apply", "--whitespace=nowarn", "-"], input=patch)
    return trees.read_directory(root, "result") if any(p.name != ".git" for p in root.iterdir()) else {}


CONTENT = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from([b"a\n", b"b\r\n", b"c", b" \n", b"\n", b"\t\n"]), max_size=6).map(b"".join),
)
NAMES = st.sampled_from(["a.py", "dir/b.txt", "dir/.gitattributes", "c d", "ü.py", 'q"t', "-x", "dir/sub/e.bin"])
FILES = st.builds(TreeFile, CONTENT, st.sampled_from([0o644, 0o755]))
TREES = st.dictionaries(NAMES, FILES, max_size=5)


@settings(max_examples=25, deadline=None)
@given(old=TREES, new=TREES)
def test_patches_are_exact(tmp_path_factory: pytest.TempPathFactory, old: Tree, new: Tree) -> None:
    patch = diff_trees(old, new)
    if old == new:
        assert patch == b""
    else:
        assert apply(old, patch, tmp_path_factory.mktemp("apply") / "work") == dict(sorted(new.items()))


def test_patch_ignores_the_attributes_in_the_tree_and_keeps_links(tmp_path: Path) -> None:
    attributes = TreeFile(b"* text=auto eol=lf -diff filter=evil ident\n")
    old = {".gitattributes": attributes, "a.txt": TreeFile(b"$Id$\r\nx"), "l": TreeFile(b"a.txt", trees.SYMLINK)}
    new = {".gitattributes": attributes, "a.txt": TreeFile(b"$Id$\r\ny\n"), "l": TreeFile(b"b", trees.SYMLINK)}
    patch = diff_trees(old, new)
    assert b"+y\n" in patch
    assert b"GIT binary" not in patch
    assert apply(old, diff_trees(old, new), tmp_path / "work") == new


def test_patch_within_paths() -> None:
    old = {"src/a.py": TreeFile(b"1\n"), "docs": TreeFile(b"x\n")}
    new = {"src/a.py": TreeFile(b"2\n"), "docs": TreeFile(b"y\n"), "src/n.py": TreeFile(b"")}
    patch = diff_trees(old, new, ["src"])
    assert b"docs" not in patch
    assert b"src/n.py" in patch
    with pytest.raises(ConfigError, match="matches no file"):
        diff_trees(old, new, ["lib"])


def host_git(root: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    }  # fmt: skip
    done = subprocess.run(["git", *arguments], cwd=root, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


async def test_git_source_reads_exactly_one_commit(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    host_git(origin, "init", "-q")
    (origin / ".gitattributes").write_bytes(b"secret export-ignore\n*.txt text eol=crlf\n")
    (origin / "secret").write_bytes(b"$Format:%H$")
    (origin / "a.txt").write_bytes(b"1\n")
    (origin / "run.sh").write_bytes(b"")
    (origin / "run.sh").chmod(0o755)
    (origin / "l").symlink_to("a.txt")
    host_git(origin, "add", "-A")
    host_git(origin, "commit", "-qm", "one")
    first = host_git(origin, "rev-parse", "HEAD")
    (origin / "a.txt").write_bytes(b"2\n")
    host_git(origin, "commit", "-qam", "two")
    source = GitSource(str(origin), first)
    expected = {
        ".gitattributes": TreeFile(b"secret export-ignore\n*.txt text eol=crlf\n"),
        "a.txt": TreeFile(b"1\n"),
        "l": TreeFile(b"a.txt", trees.SYMLINK),
        "run.sh": TreeFile(b"", 0o755),
        "secret": TreeFile(b"$Format:%H$"),
    }
    assert await fetch(source, tmp_path) == expected
    with pytest.raises(SourceUnavailable, match="cannot be fetched"):
        await fetch(GitSource(str(origin), "a" * 40), tmp_path)
    with pytest.raises(SourceUnavailable) as caught:
        await fetch(GitSource("http://me:secret@127.0.0.1:9/x", first), tmp_path)
    assert "secret" not in str(caught.value)
    packs = [p for p in (tmp_path / "cache" / "git").rglob("*") if p.is_file() and "objects" in p.parts]
    for pack in packs:
        pack.chmod(0o644)
        pack.write_bytes(b"rot")
    assert await fetch(source, tmp_path) == expected
    origin.rename(tmp_path / "gone")
    assert await fetch(source, tmp_path) == expected


class Index(ThreadingHTTPServer):
    """A package index on loopback: one project `thing` with one file, counted downloads."""

    def __init__(self, sdist: bytes) -> None:
        super().__init__(("127.0.0.1", 0), IndexRequest)
        self.sdist = sdist
        self.sha256 = hashlib.sha256(sdist).hexdigest()
        self.downloads = 0


class IndexRequest(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/thing/":
            body = b'<a href="/files/thing-1.0.tar.gz#sha256=%b">thing-1.0.tar.gz</a>' % self.server.sha256.encode()
        elif self.path == "/files/thing-1.0.tar.gz":
            self.server.downloads += 1
            body = self.server.sdist
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    setup = member("thing-1.0/setup.py", b"raise SystemExit('executed')")
    server = Index(make_tar(setup, member("thing-1.0/src/thing.py", b"1\n")))
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def test_sdist_is_fetched_once_verified_and_repaired(tmp_path: Path, index: Index) -> None:
    source = PypiSource("thing", "1.0", index.sha256)
    tree = await fetch(source, tmp_path)
    assert list(tree) == ["setup.py", "src/thing.py"]
    assert await fetch(PypiSource("thing", "1.0", index.sha256, "src"), tmp_path) == {"thing.py": TreeFile(b"1\n")}
    assert index.downloads == 1
    cached = tmp_path / "cache" / "sdists" / index.sha256
    cached.write_bytes(b"rot")
    assert await fetch(source, tmp_path) == tree
    assert index.downloads == 2
    assert [p.name for p in cached.parent.iterdir()] == [index.sha256]


async def test_many_at_once_leave_one_good_file(tmp_path: Path, index: Index) -> None:
    trees_found: list[Tree] = []

    async def one() -> None:
        trees_found.append(await fetch(PypiSource("thing", "1.0", index.sha256), tmp_path))

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(one)
    assert [list(tree) for tree in trees_found] == [["setup.py", "src/thing.py"]] * 6
    assert [p.name for p in (tmp_path / "cache" / "sdists").iterdir()] == [index.sha256]


async def test_sdist_of_another_digest_is_never_kept(tmp_path: Path, index: Index) -> None:
    with pytest.raises(ConfigError, match=r"thing 1.0 with this sha256"):
        await fetch(PypiSource("thing", "1.0", SHA), tmp_path)
    with pytest.raises(ConfigError, match=r"thing 2.0 of this version"):
        await fetch(PypiSource("thing", "2.0", SHA), tmp_path)
    with pytest.raises(ConfigError, match="no project 'other'"):
        await fetch(PypiSource("other", "1.0", SHA), tmp_path)
    promised = index.sha256
    index.sdist = b"something else"
    with pytest.raises(ConfigError, match="another sha256"):
        await fetch(PypiSource("thing", "1.0", promised), tmp_path)
    assert list((tmp_path / "cache" / "sdists").iterdir()) == []


async def test_offline_names_package_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(SourceUnavailable, match=r"thing 1.0 is not in the cache"):
        await fetch(PypiSource("thing", "1.0", SHA), tmp_path)


async def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypi_simple", None)
    with pytest.raises(ConfigError, match=r"pip install 'skyenv\[pypi\]'"):
        await fetch(PypiSource("thing", "1.0", SHA), tmp_path)


def test_default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYENV_CACHE", "/somewhere")
    assert sources.default_cache() == Path("/somewhere")
    monkeypatch.delenv("SKYENV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert sources.default_cache() == Path("/xdg/skyenv")


@pytest.mark.network
async def test_a_real_sdist(tmp_path: Path) -> None:
    sha256 = "27a5c770d068c110d9ed9323f24f1543e83b2f300a687b7891c1a6d56b697b5b"
    tree = await fetch(PypiSource("toolz", "1.1.0", sha256), tmp_path)
    assert tree["toolz/__init__.py"].data.startswith(b"from .itertoolz")
