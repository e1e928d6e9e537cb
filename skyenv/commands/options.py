"""What the server commands share: common flags, and `--config FILE`, a YAML mapping of the same flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from skyenv.errors import ConfigError, did_you_mean
from skyenv.remote.listen import Listening
from skyenv.remote.logs import FORMATS, LEVELS, log_to_stderr
from skyenv.remote.tokens import read_token


def add_server_flags(parser: argparse.ArgumentParser, port: int) -> None:
    """The flags of every server. What is not given is absent, so that defaults live in the options' own classes."""
    parser.add_argument("--config", type=Path, help="YAML file with these options, without the dashes in front")
    parser.add_argument("--host", help="address to bind (default: loopback only)")
    parser.add_argument("--port", type=int, help=f"port to bind; 0 picks a free one (default {port})")
    parser.add_argument("--token", help="clients must send this token; required for any host but loopback")
    parser.add_argument(
        "--token-file",
        type=Path,
        help="clients' tokens, `name: token` a line, or a bare token; SIGHUP reads it again",
    )
    parser.add_argument("--tls-cert", type=Path, help="PEM file with the server's certificates: speak TLS")
    parser.add_argument("--tls-key", type=Path, help="PEM file with the certificate's key")
    parser.add_argument("--join-token-file", type=Path, help="the token that nodes and gateways share")
    parser.add_argument("--log-format", choices=FORMATS, help="lines for people, or JSON objects (default text)")
    parser.add_argument(
        "--log-level", choices=LEVELS, help="from where on to log; debug tells each command's id (default info)"
    )
    parser.add_argument(
        "--otlp-endpoint", help="URL to send OpenTelemetry spans to, such as http://HOST:4318/v1/traces"
    )
    parser.add_argument("--ca", type=Path, help="PEM file of certificates to trust between nodes and gateways")


def given(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the command line over those of the config file. ConfigError naming an unknown one."""
    line = vars(arguments)
    filed = vars(parser.parse_args(_as_arguments(parser, line["config"]))) if "config" in line else {}
    return {key: value for key, value in (filed | line).items() if key not in ("run", "parser", "config")}


def _as_arguments(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: a mapping of options is wanted")
    known = {flag.removeprefix("--") for flag in parser._option_string_actions if flag.startswith("--")}
    known -= {"help", "config"}
    found: list[str] = []
    for key, value in values.items():
        if str(key) not in known:
            raise ConfigError(f"--config {path}: there is no option {key!r}{did_you_mean(str(key), sorted(known))}")
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, (dict, list)) or one is None:
                raise ConfigError(f"--config {path}: {key}: a plain value is wanted")
            if isinstance(one, bool):
                found += [f"--{key}"] if one else []
            else:
                found.append(f"--{key}={one}")
    return found


def backend_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` each, the value as YAML. ConfigError for anything else."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            settings[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--backend-option {pair}: the value is no YAML: {error}") from error
        if not equals or not key.strip():
            raise ConfigError(f"--backend-option {pair}: KEY=VALUE is wanted")
    return settings


def listening(options: dict[str, Any], port: int) -> Listening:
    """Take from `options` where to listen."""
    return Listening(
        options.pop("host", "127.0.0.1"),
        options.pop("port", port),
        options.pop("tls_cert", None),
        options.pop("tls_key", None),
    )


def start_logging(options: dict[str, Any]) -> None:
    """Take from `options` how to log, and begin."""
    log_to_stderr(options.pop("log_format", "text"), options.pop("log_level", "info"))


def join_token(options: dict[str, Any]) -> str | None:
    """Take from `options` the token of nodes and gateways."""
    path = options.pop("join_token_file", None)
    return read_token(path) if path is not None else None
