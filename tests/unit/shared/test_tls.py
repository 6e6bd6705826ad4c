from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives import serialization

from shared.errors import ConfigError
from shared.tls import TlsCredentials, TlsFiles, TlsRole, is_loopback, load_tls
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_no_file_no_tls() -> None:
    assert TlsFiles.given(TlsRole.MESH, "", "", "") is None
    assert load_tls(None) is None


def test_files_become_credentials(ca: Authority) -> None:
    pair = ca.pair()
    files = TlsFiles.given(TlsRole.MESH, pair.certificate, pair.private_key, ca.file)
    loaded = load_tls(files)
    assert loaded is not None
    assert loaded.certificate is not None
    assert loaded.certificate.startswith(b"-----BEGIN CERTIFICATE-----")
    assert loaded.private_key is not None
    assert b"PRIVATE KEY" in loaded.private_key
    assert loaded.authorities is not None
    assert "PRIVATE" not in repr(loaded), "a key is not shown by accident"


def test_a_client_needs_nothing_of_its_own(ca: Authority) -> None:
    assert TlsFiles().load() == TlsCredentials()
    assert TlsFiles(authorities=ca.file).load().certificate is None


@pytest.mark.parametrize(
    ("role", "given", "message"),
    [
        (TlsRole.PUBLIC, ("c", "", ""), "--tls-cert and --tls-key go together"),
        (TlsRole.PUBLIC, ("", "k", ""), "--tls-cert and --tls-key go together"),
        (TlsRole.PUBLIC, ("", "", "a"), "--tls-client-ca needs --tls-cert and --tls-key"),
        (TlsRole.MESH, ("c", "k", ""), "--mesh-tls-cert, --mesh-tls-key and --mesh-tls-ca go together"),
        (TlsRole.MESH, ("", "", "a"), "--mesh-tls-cert, --mesh-tls-key and --mesh-tls-ca go together"),
        (TlsRole.CLIENT, ("c", "", "a"), "--client-cert and --client-key go together"),
    ],
)
def test_what_goes_together(role: TlsRole, given: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TlsFiles.given(role, *given)


def test_files_that_are_not_there_or_not_what_they_should_be(ca: Authority, tmp_path: Path) -> None:
    pair, other = ca.pair(), ca.pair()
    text = tmp_path / "text"
    text.write_text("no PEM, schön")
    large = tmp_path / "large"
    large.write_bytes(b"x" * ((1 << 20) + 1))
    locked = tmp_path / "locked"
    key = serialization.load_pem_private_key((tmp_path / "ca-1.key").read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for certificate, private_key, authorities, message in (
        ("/absent", pair.private_key, ca.file, "--mesh-tls-cert /absent cannot be read: No such file"),
        (pair.certificate, str(tmp_path), ca.file, "--mesh-tls-key .* cannot be read: Is a directory"),
        (pair.certificate, pair.private_key, "/absent", "--mesh-tls-ca /absent cannot be read"),
        (pair.certificate, pair.private_key, str(large), "--mesh-tls-ca .* has more than 1048576 bytes"),
        (pair.certificate, pair.private_key, str(text), "--mesh-tls-ca .* holds no certificate in PEM"),
        (pair.private_key, pair.private_key, ca.file, "--mesh-tls-cert .* holds no certificate in PEM"),
        (pair.certificate, other.private_key, ca.file, "--mesh-tls-key .* is not the key of --mesh-tls-cert"),
        (pair.certificate, str(text), ca.file, "--mesh-tls-key .* is not a private key in PEM without a password"),
        (pair.certificate, str(locked), ca.file, "--mesh-tls-key .* is not a private key in PEM without a password"),
    ):
        with pytest.raises(ConfigError, match=message):
            TlsFiles(certificate, private_key, authorities, TlsRole.MESH).load()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("stage-0", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
