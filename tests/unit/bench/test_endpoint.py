from __future__ import annotations

import pytest

from bench.load.endpoint import Endpoint
from bench.load.event_stream import EventStream
from shared.errors import ConfigError, ProtocolError
from shared.tls import TlsFiles


@pytest.mark.parametrize(
    ("url", "address", "path", "full"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "", "http://127.0.0.1:8000"),
        ("http://host/v1/", "host:80", "", "http://host:80"),
        ("https://host/a/b/v1", "host:443", "/a/b", "https://host:443/a/b"),
        ("https://[::1]:9", "[::1]:9", "", "https://[::1]:9"),
        ("grpc://host", "host:50051", "", "grpc://host:50051"),
        ("grpcs://host:1", "host:1", "", "grpcs://host:1"),
    ],
)
def test_urls(url: str, address: str, path: str, full: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.address, endpoint.path, endpoint.url) == (address, path, full)
    assert endpoint.is_grpc == url.startswith("grpc")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "is no endpoint: write for example"),
        ("", "is no endpoint"),
        ("ftp://host", "is no endpoint"),
        ("http://", "is no endpoint"),
        ("http://host:0x50", "is no endpoint"),
        ("http://host:70000", "is no endpoint"),
        ("http://höst", "is no endpoint"),
        ("http://user:secret@host", "no user"),
        ("http://host/v1?x=1", "no user, query"),
        ("http://host/a b", "characters that no URL has"),
        ("grpc://host/v1/x", "has no path"),
        ("http://[::1", "is no endpoint"),
    ],
)
def test_what_is_no_endpoint_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Endpoint.parse(url)


def test_tls_files_need_a_scheme_with_tls() -> None:
    files = TlsFiles(authorities="ca.pem")
    for url in ("http://host", "grpc://host"):
        with pytest.raises(ConfigError, match="is without TLS: write"):
            Endpoint.parse(url, tls=files)
    assert Endpoint.parse("grpcs://host", tls=files).tls is files


def test_a_key_stays_out_of_sight_and_must_fit_into_a_header() -> None:
    assert "hidden" not in repr(Endpoint.parse("http://host", api_key="hidden"))
    with pytest.raises(ConfigError, match="printable ASCII"):
        Endpoint.parse("http://host", api_key="a\r\nX-Other: b")


def test_events_are_the_same_however_the_bytes_are_cut() -> None:
    stream = b': hello\ndata: {"a":1}\n\nevent: x\r\ndata:two\r\n\r\ndata: [DONE]\n\n'
    expected = [b'{"a":1}', b"two", b"[DONE]"]
    assert EventStream().feed(stream) == expected
    for size in (1, 2, 7):
        events = EventStream()
        pieces = (stream[at : at + size] for at in range(0, len(stream), size))
        assert [event for piece in pieces for event in events.feed(piece)] == expected


def test_a_line_without_end_is_given_up() -> None:
    events = EventStream()
    assert events.feed(b"x" * (4 << 20)) == []
    with pytest.raises(ProtocolError, match="more than"):
        events.feed(b"x")
