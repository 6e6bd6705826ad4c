"""Who is served next: weighted fair shares between clients, first come first served within each. Pure, no clock.

Start-time fair queueing for a server that serves several at once, SFQ(D) (Jin, Chase, Kaur: "Interposed Proportional
Sharing for a Storage Service Utility", SIGMETRICS '04; SFQ itself is Goyal, Vin, Cheng, SIGCOMM '96). Each client has a
*tag*, the virtual time at which its next request starts: what it has been served, divided by its weight. The least tag
is next, and becomes the virtual time; a client that had nothing to ask for starts there, so that it can neither save up
its share nor fall behind. What an output will cost nobody knows: it is charged when the request leaves, as in "Fairness
in Serving Large Language Models" (Sheng et al., OSDI '24). Charging an upper bound first and giving back later would
put everybody who comes in between far behind.

Invariants: no more places are taken than there are, in all and by each client; a request that needs several places at
once is not overtaken while it waits for the last of them; while more waits than may, the client that has the most
waiting for its weight loses its latest request. With one client all this is a plain queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.gateway.clients import Client

__all__ = ["FairQueue", "Ticket"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on its way through the queue."""

    client: Client
    num_places: int = 1
    """Choices of the request: each is a sequence of its own in the engine."""
    cost: float = 1.0
    """Work that it is sure to be, tokens."""
    num_bytes: int = 0
    """What it keeps in memory while it waits."""
    spent: float = 0.0
    """Work that it was in the end, tokens, where that is more."""
    number: int = -1
    """Order of arrival."""


@dataclass(slots=True, eq=False)
class _Flow:
    """The requests of one client, who is as its latest request says."""

    client: Client
    tag: float
    waiting: dict[Ticket, None] = field(default_factory=dict)
    """In order of arrival."""
    num_waiting: int = 0
    """Places that they want."""
    num_waiting_bytes: int = 0
    num_served: int = 0
    """Places that are taken."""

    @property
    def is_at_its_limit(self) -> bool:
        """Whether its first request would be one too many of its own."""
        limit = self.client.max_requests
        return limit is not None and self.num_served + next(iter(self.waiting)).num_places > limit

    def take_out(self, ticket: Ticket) -> None:
        del self.waiting[ticket]
        self.num_waiting -= ticket.num_places
        self.num_waiting_bytes -= ticket.num_bytes


class FairQueue:
    """Requests that wait and requests that are served, by client."""

    def __init__(self, *, max_served: int, max_waiting: int, max_waiting_bytes: int) -> None:
        """Limits are of places, and of bytes that wait."""
        self._max_served = max_served
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._flows: dict[str, _Flow] = {}
        self._served: set[Ticket] = set()
        self._virtual_time = 0.0
        self._num_arrivals = 0
        self.num_served = 0
        """Places that are taken."""
        self.num_waiting = 0
        """Places that are waited for."""
        self.num_waiting_bytes = 0
        self._num_waiting_requests = 0

    @property
    def num_requests(self) -> int:
        """Requests that wait or are served."""
        return len(self._served) + self._num_waiting_requests

    def is_served(self, ticket: Ticket) -> bool:
        """Whether it has its places."""
        return ticket in self._served

    def enter(self, ticket: Ticket) -> None:
        """Put a request behind the others of its client; `admit` and `shed` then say what becomes of it."""
        flow = self._flows.setdefault(ticket.client.name, _Flow(ticket.client, self._virtual_time))
        flow.client = ticket.client
        if not flow.waiting:
            flow.tag = max(flow.tag, self._virtual_time)
        ticket.number = self._num_arrivals
        self._num_arrivals += 1
        flow.waiting[ticket] = None
        flow.num_waiting += ticket.num_places
        flow.num_waiting_bytes += ticket.num_bytes
        self.num_waiting += ticket.num_places
        self.num_waiting_bytes += ticket.num_bytes
        self._num_waiting_requests += 1

    def admit(self) -> list[Ticket]:
        """Give free places to those whose turn it is, and return them."""
        admitted = []
        while self.num_served < self._max_served and (flow := self._next()) is not None:
            ticket = next(iter(flow.waiting))
            if self.num_served + ticket.num_places > self._max_served:
                break  # nobody overtakes it
            self._stop_waiting(flow, ticket)
            self._served.add(ticket)
            flow.num_served += ticket.num_places
            self.num_served += ticket.num_places
            self._virtual_time = max(self._virtual_time, flow.tag)
            flow.tag += ticket.cost / ticket.client.weight
            admitted.append(ticket)
        return admitted

    def shed(self, newcomer: Ticket) -> list[Ticket]:
        """Take out what is too much since ``newcomer`` waits, and return it: the newcomer, or later ones of others."""
        num_waiting, num_bytes = self.num_waiting, self.num_waiting_bytes
        own = self._flows[newcomer.client.name]
        left = {flow: (flow.num_waiting, flow.num_waiting_bytes) for flow in self._flows.values() if flow.waiting}
        latest = {flow: reversed(flow.waiting) for flow in left}
        victims: list[tuple[_Flow, Ticket]] = []
        while num_waiting > self._max_waiting or num_bytes > self._max_waiting_bytes:
            heaviest = max(left, key=lambda flow: (self._load(*left[flow]) / flow.client.weight, flow is own))
            victim = next(latest[heaviest])
            victims.append((heaviest, victim))
            if victim is newcomer:
                victims = victims[-1:]  # without it there is room for all others
                break
            num_waiting -= victim.num_places
            num_bytes -= victim.num_bytes
            places, size = left[heaviest]
            left[heaviest] = (places - victim.num_places, size - victim.num_bytes)
        for flow, victim in victims:
            self._stop_waiting(flow, victim)
        self._forget_if_idle()
        return [victim for _, victim in victims]

    def leave(self, ticket: Ticket) -> None:
        """Take a request out, wherever it is; what has left before is no matter."""
        flow = self._flows.get(ticket.client.name)
        if flow is None:
            return
        if ticket in self._served:
            self._served.remove(ticket)
            flow.num_served -= ticket.num_places
            self.num_served -= ticket.num_places
            flow.tag += max(0.0, ticket.spent - ticket.cost) / ticket.client.weight
        elif ticket in flow.waiting:
            self._stop_waiting(flow, ticket)
        self._forget_if_idle()

    def _next(self) -> _Flow | None:
        """Return the client whose turn it is."""
        found: _Flow | None = None
        for flow in self._flows.values():
            if not flow.waiting:
                continue
            if flow.is_at_its_limit:
                # What it does not want of its share now, it cannot have later.
                flow.tag = max(flow.tag, self._virtual_time)
            elif found is None or (flow.tag, next(iter(flow.waiting)).number) < (
                found.tag,
                next(iter(found.waiting)).number,
            ):
                found = flow
        return found

    def _load(self, num_places: int, num_bytes: int) -> float:
        """Part of the queue that so much takes."""
        return max(num_places / max(1, self._max_waiting), num_bytes / max(1, self._max_waiting_bytes))

    def _stop_waiting(self, flow: _Flow, ticket: Ticket) -> None:
        flow.take_out(ticket)
        self.num_waiting -= ticket.num_places
        self.num_waiting_bytes -= ticket.num_bytes
        self._num_waiting_requests -= 1

    def _forget_if_idle(self) -> None:
        """Begin anew when nobody is there: then nobody owes anything to anybody."""
        if not self._served and not self.num_waiting:
            self._flows.clear()
            self._virtual_time = 0.0
