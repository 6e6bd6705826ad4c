from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shared.errors import UnauthenticatedError, UnavailableError
from shared.tls import TlsCredentials, TlsFiles
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.cli.conftest import FakeGateway, Outcome  # only for the type checker

COMMANDS = [("generate", "hi"), ("chat",), ("status",)]


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_by_default_there_is_neither_tls_nor_a_key(
    orca: Callable[..., Outcome], gateway: FakeGateway, command: tuple[str, ...]
) -> None:
    orca(*command)
    assert gateway.credentials == [(None, None)]


@pytest.mark.parametrize("command", COMMANDS)
def test_all_of_it(orca: Callable[..., Outcome], gateway: FakeGateway, ca: Authority, command: tuple[str, ...]) -> None:
    pair = ca.pair("client")
    files = ("--client-cert", pair.certificate, "--client-key", pair.private_key, "--tls-ca", ca.file)
    orca(*command, "--api-key", "secret", *files)
    assert gateway.credentials == [("secret", TlsFiles(pair.certificate, pair.private_key, ca.file).load())]


def test_from_the_environment(
    orca: Callable[..., Outcome], gateway: FakeGateway, ca: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCA_API_KEY", "secret")
    monkeypatch.setenv("ORCA_TLS", "1")
    orca("status")
    monkeypatch.setenv("ORCA_TLS_CA", ca.file)
    orca("status")
    authorities = TlsFiles(authorities=ca.file).load()
    assert gateway.credentials == [("secret", TlsCredentials()), ("secret", authorities)]


def test_the_help_does_not_show_the_key(
    orca: Callable[..., Outcome], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCA_API_KEY", "top-secret")
    shown = orca("status", "--help").out
    assert "ORCA_API_KEY" in shown
    assert "top-secret" not in shown


def test_files_that_cannot_work_are_told(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    for options, said in (
        (("--tls-ca", "/absent"), "--tls-ca /absent cannot be read"),
        (("--client-cert", "c"), "--client-cert and --client-key go together"),
    ):
        outcome = orca("status", *options)
        assert outcome.exit_code == 2
        assert said in outcome.err


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("x: CERTIFICATE_VERIFY_FAILED", "of no authority that is trusted here: name its authority with --tls-ca"),
        ("x: Hostname Verification Check failed.", "is that of another host"),
        ("x: WRONG_VERSION_NUMBER", "127.0.0.1:50051 does not speak TLS"),
        ("x: failed to connect; Socket closed", "it may want TLS (--tls, --tls-ca), or a certificate of yours"),
        ("x: failed to connect", "no gateway answers at 127.0.0.1:50051"),
        ("x: something else", "x: something else"),
    ],
)
def test_what_is_wrong_with_a_connection_is_told_plainly(
    orca: Callable[..., Outcome], gateway: FakeGateway, failure: str, said: str
) -> None:
    gateway.failure = UnavailableError(failure)
    outcome = orca("status")
    assert outcome.exit_code == 1
    assert said in outcome.err


def test_where_a_key_is_given_is_told(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    gateway.failure = UnauthenticatedError("an API key is required")
    outcome = orca("status")
    assert outcome.exit_code == 1
    assert "an API key is required; give yours in ORCA_API_KEY, or with --api-key" in outcome.err
