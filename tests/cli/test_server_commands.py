"""`skyenv serve` and `skyenv gateway`: what a person gets wrong is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyenv.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--host", "0.0.0.0"], "pass a token"),
        (["serve", "--token-file", "missing"], "missing: No such file"),
        (["serve", "--tls-cert", "missing"], "both a certificate and its key"),
        (["serve", "--tls-cert", "missing", "--tls-key", "missing"], "no file missing"),
        (["serve", "--slots", "0"], "slots"),
        (["serve", "--gateway", "http://127.0.0.1:1"], "--name and --join-token-file"),
        (["serve", "--gateway", "http://127.0.0.1:1", "--name", "One", "--join-token-file", "join"], "lower-case"),
        (["serve", "--gateway", "ftp://x", "--name", "one", "--join-token-file", "join"], "http:// or https://"),
        (["serve", "--host", "0.0.0.0", "--gateway", "http://g", "--name", "a", "--join-token-file", "join"], "--url"),
        (["serve", "--join-token-file", "two"], "it holds 2"),
        (["serve", "--config", "missing.yaml"], "missing.yaml: No such file"),
        (["serve", "--config", "typo.yaml"], "no option 'slot'; did you mean 'slots'"),
        (["serve", "--config", "list.yaml"], "a mapping of options"),
        (["serve", "--config", "nested.yaml"], "a plain value"),
        (["serve", "--config", "broken.yaml"], "not YAML"),
        (["serve", "--port", "70000"], "port 70000"),
        (["gateway"], "--join-token-file"),
        (["gateway", "--join-token-file", "join", "--host", "0.0.0.0"], "pass a token"),
        (["gateway", "--join-token-file", "join", "--silence", "0"], "silence"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "join": "secret",
        "two": "a: 1\nb: 2\n",
        "typo.yaml": "slot: 3\n",
        "list.yaml": "- slots\n",
        "nested.yaml": "slots: {a: 1}\n",
        "broken.yaml": "a: [\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("skyenv: ")
    assert len(error.splitlines()) == 1 or "YAML" in said


def test_a_wrong_value_in_a_config_file_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("port: many\n")
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--config", str(tmp_path / "c.yaml")])
    assert caught.value.code == 2
    assert "--port" in capsys.readouterr().err
