"""R2: many meshes of one host choose their ports at once, and nobody can take one between choice and use."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.worker.rendezvous import RendezvousServer
from shared.errors import ConfigError


def test_a_port_is_held_from_its_choice_on() -> None:
    servers = [RendezvousServer("127.0.0.1", "host.example") for _ in range(6)]
    with ThreadPoolExecutor(len(servers)) as pool:
        for _ in range(5):
            addresses = list(pool.map(RendezvousServer.renew, servers))
            assert all(address.startswith("host.example:") for address in addresses)
            ports = {int(address.rpartition(":")[2]) for address in addresses}
            assert len(ports) == len(servers)
            for port in ports:
                with pytest.raises(OSError, match="in use"):
                    socket.create_server(("127.0.0.1", port))


def test_an_address_of_another_host_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--host"):
        RendezvousServer("192.0.2.1", "192.0.2.1").renew()
