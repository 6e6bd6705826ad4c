"""Where and how the ranks of an epoch meet: the store that world rank 0 serves, the gate, the process groups.

Groups are objects of their own, never torch's global default group: an epoch ends when the last reference to its groups
is dropped, and the next one has nothing of it to clean up. A rank is in three of them at most: its stage's
tensor-parallel ranks, and a pair with the same tensor-parallel rank of the stage before and of the stage after, so that
a broken link takes no other along.

Loading takes seconds on one rank and minutes on another, so all ranks first wait at a *gate* in the store, for as long
as it takes, and only then make groups, which takes ``collective_timeout_s`` at most. No data of a request ever goes
through the store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed re-exports them, but not to type checkers
    Backend,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from torch.distributed import DistError

from shared.errors import ConfigError, EngineLostError
from shared.rpc import bound_address
from shared.topology import Topology

if TYPE_CHECKING:
    from shared.messages import JoinRequest

__all__ = ["Gate", "ProcessGroups", "RendezvousServer", "make_groups"]

_GATE_TIMEOUT = timedelta(days=1)
"""A rank may load for as long as it likes; the scheduler cancels when one is lost."""


class RendezvousServer:
    """The stores of world rank 0, one after the other, at ``host`` only and at ports that nobody else can take."""

    def __init__(self, host: str, advertised_host: str) -> None:
        self._host = host
        self._advertised_host = advertised_host
        self._store: Store | None = None

    def renew(self) -> str:
        """Serve an empty store in place of the one before; return its ``host:port`` as other hosts reach it.

        Raises ``ConfigError`` when ``host`` is not an address of this host.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, 0), family=family)
        except OSError as failure:
            raise ConfigError(
                f"cannot serve the rendezvous store at {self._host}: {failure.strerror}; "
                f"give --host an address of this host"
            ) from failure
        port: int = listener.getsockname()[1]
        # The store owns the socket from here on: its port was never free between choice and use.
        self._store = TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return bound_address(self._advertised_host, port)


class Gate:
    """Holds this rank back until all ranks of the epoch are here, or until it is told to give up."""

    def __init__(self, request: JoinRequest) -> None:
        topology = Topology(request.num_stages, request.tp_size)
        self._rank = topology.world_rank(request.stage, request.tp_rank)
        self._world_size = topology.world_size
        self._request = request
        self._lock = threading.Lock()
        self._is_waiting = False
        self._is_abandoned = False

    def wait(self) -> Store:
        """Block until all ranks are here, and return the epoch's own part of the store.

        Raises ``EngineLostError`` when the store cannot be reached or goes away, or when the gate was abandoned.
        """
        where = self._request.rendezvous_address
        try:
            store = _connect(self._request)
            with self._lock:
                self._is_waiting = True
                self._check()
            if store.add("arrived", 1) == self._world_size:
                for rank in range(self._world_size):
                    store.set(f"open/{rank}", "")
            store.wait([f"open/{self._rank}"], _GATE_TIMEOUT)
        except DistError as failure:
            raise EngineLostError(
                f"the rendezvous store at {where} is out of reach ({_first_line(failure)}): "
                f"see to the worker of stage 0, rank 0, and to the network between the hosts"
            ) from failure
        finally:
            self._is_waiting = False
        self._check()
        return store

    def abandon(self) -> None:
        """Let ``wait`` fail, now or later; from any thread. Blocks until the store was told or ``wait`` is over."""
        with self._lock:
            self._is_abandoned = True
        while self._is_waiting:
            # The waiting client is held by its own wait: only a second connection gets a word through.
            with contextlib.suppress(DistError):
                _connect(self._request).set(f"open/{self._rank}", "")
                return

    def _check(self) -> None:
        if self._is_abandoned:
            raise EngineLostError(f"joining epoch {self._request.epoch} was given up")


@dataclass(slots=True)
class ProcessGroups:
    """The groups that a rank is in; None where there is nobody to talk to."""

    tensor_parallel: ProcessGroup | None = None
    """Ranks by tp_rank."""
    previous: ProcessGroup | None = None
    """Rank 0 is the stage before, rank 1 is this one."""
    following: ProcessGroup | None = None
    """Rank 0 is this stage, rank 1 is the one after."""

    def abort(self) -> None:
        """End what is under way on GPUs; gloo has no such thing and ends when its peer does or by its time limit."""
        for group in (self.tensor_parallel, self.previous, self.following):
            if group is not None:
                group.abort()

    def drop(self) -> None:
        """Let go of all groups, which closes their connections."""
        self.tensor_parallel = self.previous = self.following = None


def make_groups(request: JoinRequest, store: Store, device: torch.device, host: str) -> ProcessGroups:
    """Connect to this rank's peers; ``host`` is the interface that gloo listens at.

    Every rank makes the link to the stage before first, so that stage 0 starts a chain that cannot wait in a circle.
    Raises ``EngineLostError`` when a peer does not come within ``collective_timeout_s``.
    """
    stage, tp_rank = request.stage, request.tp_rank

    def connect(name: str, rank: int, size: int) -> ProcessGroup:
        try:
            return _make_group(PrefixStore(name, store), rank, size, device, host, request.collective_timeout_s)
        except RuntimeError as failure:
            raise EngineLostError(
                f"stage {stage}, rank {tp_rank} cannot meet its peers of group {name!r}: {_first_line(failure)}"
            ) from failure

    groups = ProcessGroups()
    if stage > 0:
        groups.previous = connect(f"link/{stage - 1}/{tp_rank}", 1, 2)
    if request.tp_size > 1:
        groups.tensor_parallel = connect(f"stage/{stage}", tp_rank, request.tp_size)
    if stage + 1 < request.num_stages:
        groups.following = connect(f"link/{stage}/{tp_rank}", 0, 2)
    return groups


def _connect(request: JoinRequest) -> Store:
    host, _, port = request.rendezvous_address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"the rendezvous address is not HOST:PORT: {request.rendezvous_address!r}")
    timeout = timedelta(seconds=request.collective_timeout_s)
    client = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout)
    return PrefixStore(f"epoch/{request.epoch}", client)


def _make_group(store: Store, rank: int, size: int, device: torch.device, host: str, timeout_s: int) -> ProcessGroup:
    timeout = timedelta(seconds=timeout_s)
    group = ProcessGroup(store, rank, size)
    if device.type == "cuda":
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout  # noqa: SLF001 - the name that torch's own factories use
        nccl = dist.ProcessGroupNCCL(store, rank, size, nccl_options)
        nccl.eager_connect_single_device(device)
        _register(group, device, ProcessGroup.BackendType.NCCL, nccl)
        return group
    gloo_options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    gloo_options._timeout = timeout  # noqa: SLF001
    gloo_options._threads = 2  # noqa: SLF001
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    gloo_options._devices = [  # noqa: SLF001
        ProcessGroupGloo.create_device(interface=interface)
        if interface
        else ProcessGroupGloo.create_device(hostname=host)
    ]
    gloo = ProcessGroupGloo(store, rank, size, gloo_options)
    _register(group, device, ProcessGroup.BackendType.GLOO, gloo)
    return group


def _register(group: ProcessGroup, device: torch.device, kind: ProcessGroup.BackendType, backend: Backend) -> None:
    group._set_default_backend(kind)  # noqa: SLF001 - how torch.distributed puts its own groups together
    group._register_backend(device, kind, backend)  # noqa: SLF001


def _first_line(failure: BaseException) -> str:
    return str(failure).partition("\n")[0]
