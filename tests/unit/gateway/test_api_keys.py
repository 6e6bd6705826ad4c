from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api_keys import MAX_FILE_BYTES, Authenticator
from services.gateway.clients import ANONYMOUS, Client, bind_client, calling_client
from services.gateway.key_file import MAX_KEYS, parse_keys
from shared.errors import ConfigError, UnauthenticatedError

ALICE = "alice-secret-0123456789"
BOB = "bob#secret=weight=2-0123456789"
HASHED = "sha256:" + hashlib.sha256(BOB.encode()).hexdigest()
FILE = f"""
# name  secret
alice   {ALICE}   weight=2.5 max_requests=7  # the first
bob     {HASHED}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(FILE)
    return file


def test_secrets_as_they_are_and_hashed(path: Path) -> None:
    keys = Authenticator(path)
    assert keys.requires_key
    assert keys.authenticate(f"Bearer {ALICE}") == Client("alice", 2.5, 7)
    assert keys.authenticate(f"bearer  {BOB} ") == Client("bob")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        ALICE,
        f"Basic {ALICE}",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        f"Bearer {ALICE} {ALICE}",
        f"Bearer {HASHED}",
        "Bearer ключ-не-ascii",
        "Bearer \ud800",
        "Bearer " + "x" * 100_000,
    ],
)
def test_whoever_has_no_key_is_refused(path: Path, header: str | None) -> None:
    with pytest.raises(UnauthenticatedError) as refused:
        Authenticator(path).authenticate(header)
    assert ALICE not in str(refused.value)


@given(st.text())
def test_no_header_breaks_the_check(header: str) -> None:
    keys = Authenticator()
    keys._path, keys._clients = os, parse_keys(FILE, origin="keys")  # type: ignore[assignment]
    with pytest.raises(UnauthenticatedError):
        keys.authenticate(header)


def test_without_a_file_everybody_may_call() -> None:
    keys = Authenticator()
    assert not keys.requires_key
    assert keys.authenticate(None) is keys.authenticate("Bearer whatever") is ANONYMOUS
    assert keys.reload_if_changed() is False


def test_a_key_is_replaced_without_a_gap() -> None:
    both = parse_keys(f"a {ALICE} weight=2\na {HASHED} weight=2.0", origin="keys")
    assert list(both.values()) == [Client("a", 2), Client("a", 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{ALICE}/= weight=1", "keys, line 1: the first word is not a name"),
        ("\n\nalice", "keys, line 3: 'alice' has no secret; a line is: NAME SECRET"),
        ("alice # later", "line 1: 'alice' has no secret"),
        ("alice short", "line 1: the secret of 'alice' has 5 characters; it must have from 16 to 512"),
        ("alice " + "x" * 513, "has 513 characters"),
        ("alice schlüssel-0123456789", "printable ASCII"),
        ("alice sha256:12ab", "after sha256: come 64 hexadecimal digits"),
        (f"alice {ALICE} {BOB}", "line 1: after the secret come weight=N and max_requests=N, nothing else"),
        (f"alice weight=2 {ALICE}", "the secret of 'alice' has 8 characters"),
        (f"alice {ALICE} weight=heavy", "weight is 'heavy', which is no number"),
        (f"alice {ALICE} weight=", "weight is '', which is no number"),
        (f"alice {ALICE} weight=0", "weight is 0; it must be above 0 and at most 1000"),
        (f"alice {ALICE} weight=nan", "weight is nan"),
        (f"alice {ALICE} weight=inf", "weight is inf"),
        (f"alice {ALICE} max_requests=0", "max_requests is 0; it must be between 1 and"),
        (f"alice {ALICE} max_requests=1.5", "max_requests is '1.5', which is no number"),
        (f"alice {ALICE} weight=1 weight=1", "weight is given twice"),
        (f"alice {ALICE}\nbob {ALICE}", "keys, line 2: the secret of 'bob' stands in line 1 already"),
        (f"a {ALICE} weight=2\na {BOB}", "keys, line 2: 'a' has other options in line 1"),
        ("# nobody\n", "keys has no key in it"),
        ("\n".join(f"a{n} secret-0123456789-{n}" for n in range(MAX_KEYS + 1)), "keys has 1025 keys; at most 1024"),
    ],
)
def test_what_cannot_be_meant_is_told_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys(text, origin="keys")
    assert message in str(refused.value)
    assert ALICE not in str(refused.value)
    assert BOB not in str(refused.value)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        assert parse_keys(text, origin="keys")
    except ConfigError as error:
        assert str(error).startswith("keys")  # noqa: PT017 - any text may also be refused


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-keys .*absent cannot be read: No such file"):
        Authenticator(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Authenticator(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 2\)"):
        Authenticator(binary)
    long = tmp_path / "long"
    long.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match=f"has more than {MAX_FILE_BYTES} bytes"):
        Authenticator(long)


def test_a_changed_file_counts_and_a_broken_one_does_not(path: Path) -> None:
    keys = Authenticator(path)
    assert not keys.reload_if_changed()
    with structlog.testing.capture_logs() as logs:
        path.write_text(f"carol {ALICE}")
        assert keys.reload_if_changed()
        assert keys.authenticate(f"Bearer {ALICE}") == Client("carol")
        with pytest.raises(UnauthenticatedError):
            keys.authenticate(f"Bearer {BOB}")
        path.write_text(f"carol {ALICE} {BOB}")
        assert not keys.reload_if_changed()
        assert not keys.reload_if_changed(), "told once"
        path.unlink()
        assert not keys.reload_if_changed()
        assert keys.authenticate(f"Bearer {ALICE}") == Client("carol"), "the keys of before stay"
        path.write_text(FILE)
        assert keys.reload_if_changed()
        assert keys.authenticate(f"Bearer {ALICE}").name == "alice"
    assert [(log["event"], log["log_level"]) for log in logs] == [
        ("api_keys_loaded", "info"),
        ("api_keys_not_loaded", "error"),
        ("api_keys_not_loaded", "error"),
        ("api_keys_loaded", "info"),
    ]
    assert not any(secret in str(logs) for secret in (ALICE, BOB, HASHED))


def test_who_calls_is_known_where_it_matters() -> None:
    assert calling_client() is ANONYMOUS
    from contextvars import copy_context

    def call() -> Client:
        bind_client(Client("alice"))
        return calling_client()

    assert copy_context().run(call) == Client("alice")
    assert calling_client() is ANONYMOUS


def test_the_file_that_the_readme_shows_is_one() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(# name .*?)```$", readme, re.MULTILINE | re.DOTALL)
    clients = parse_keys(shown, origin="README.md").values()
    assert {client.name: (client.weight, client.max_requests) for client in clients} == {
        "alice": (3, None),
        "bob": (1, 8),
    }
