"""Certificates made for a test by an authority of its own, as files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trustme

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Authority", "Pair"]


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: str
    private_key: str


class Authority:
    """Signs certificates; everything it makes lies in a folder of the test."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self._ca = trustme.CA()
        self._num_pairs = 0
        self.file = str(folder / f"{name}.pem")
        """The authority's own certificate."""
        self._ca.cert_pem.write_to_path(self.file)

    def pair(self, *hosts: str) -> Pair:
        """Make a certificate for ``hosts``, by default this host."""
        self._num_pairs += 1
        stem = self._folder / f"{self._name}-{self._num_pairs}"
        pair = Pair(f"{stem}.crt", f"{stem}.key")
        made = self._ca.issue_cert(*(hosts or ("127.0.0.1", "localhost")))
        made.private_key_pem.write_to_path(pair.private_key)
        for at, blob in enumerate(made.cert_chain_pems):
            blob.write_to_path(pair.certificate, append=at > 0)
        return pair
