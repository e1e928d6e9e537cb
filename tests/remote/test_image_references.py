"""Names of images, as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv.errors import ConfigError
from skyenv.remote.images.references import parse
from skyenv.remote.images.registry import is_loopback

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.11", "docker.io/library/python:3.11"),
        ("docker.io/python", "docker.io/library/python:latest"),
        ("index.docker.io/team/tool", "docker.io/team/tool:latest"),
        ("docker://team/tool:1", "docker.io/team/tool:1"),
        ("localhost/tool", "localhost/tool:latest"),
        ("host:5000/a/b/c:x", "host:5000/a/b/c:x"),
        ("[::1]:5000/a", "[::1]:5000/a:latest"),
        (f"ghcr.io/a/b@{DIGEST}", f"ghcr.io/a/b@{DIGEST}"),
        (f"host:5000/a:1@{DIGEST}", f"host:5000/a:1@{DIGEST}"),
        ("oci:/srv/layout", "oci:/srv/layout"),
        ("oci:/srv/layout:tag", "oci:/srv/layout:tag"),
        ("docker-archive:/srv/a.tar:team/tool:1", "docker-archive:/srv/a.tar:team/tool:1"),
        ("docker-daemon:python", "docker-daemon:python:latest"),
        ("podman:localhost/x:1", "podman:localhost/x:1"),
        ("dir:/srv/root/", "dir:/srv/root"),
    ],
)
def test_a_reference_has_one_full_form(text: str, full: str) -> None:
    assert str(parse(text)) == full
    assert parse(full) == parse(text)


@pytest.mark.parametrize(
    "text",
    ["", ":", "Python", "a b", "a/", "/a", "a//b", "../a", "a:", "a:b:c", "a@sha256:12", "a@md5:00", "host:5000/",
     "oci:relative", "oci:/x:", "dir:x", "http://host/a", "a\nb", "docker-daemon:", "a:" + "x" * 129],
)  # fmt: skip
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="image"):
        parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_reference_or_a_config_error(text: str) -> None:
    try:
        reference = parse(text)
    except ConfigError:
        return
    assert parse(str(reference)) == reference


@pytest.mark.parametrize("host", ["localhost", "localhost:5000", "127.0.0.1:1", "127.9.9.9", "[::1]:80"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)
    assert not is_loopback("example.org:5000")
    assert not is_loopback("127.0.0.1.example.org")
