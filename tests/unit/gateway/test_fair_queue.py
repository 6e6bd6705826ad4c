from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.gateway.clients import Client
from services.gateway.fair_queue import FairQueue, Ticket


def queue(max_served: int = 1, max_waiting: int = 10**6, max_waiting_bytes: int = 10**9) -> FairQueue:
    return FairQueue(max_served=max_served, max_waiting=max_waiting, max_waiting_bytes=max_waiting_bytes)


def entered(fair: FairQueue, client: Client, count: int = 1, **fields: Any) -> list[Ticket]:
    tickets = [Ticket(client, **fields) for _ in range(count)]
    for ticket in tickets:
        fair.enter(ticket)
    return tickets


def served_in_turn(fair: FairQueue) -> list[Ticket]:
    """Serve all, the oldest leaving whenever nobody else can start."""
    order: list[Ticket] = []
    running: deque[Ticket] = deque()
    while fair.num_requests:
        started = fair.admit()
        order += started
        running += started
        if not started:
            fair.leave(running.popleft())
    return order


def test_one_client_is_served_first_come_first_served() -> None:
    fair = queue(3)
    costs = itertools.cycle([5.0, 500.0, 1.0])
    tickets = [ticket for cost in itertools.islice(costs, 20) for ticket in entered(fair, Client("a"), cost=cost)]
    assert served_in_turn(fair) == tickets


def test_a_newcomer_does_not_wait_for_all_of_a_flood() -> None:
    fair = queue(2)
    flood = entered(fair, Client("a"), 100)
    fair.admit()
    (late,) = entered(fair, Client("b"))
    fair.leave(flood[0])
    assert fair.admit() == [late]


def test_shares_follow_weights() -> None:
    fair = queue(4)
    entered(fair, Client("a", weight=3), 400)
    entered(fair, Client("b", weight=1), 400)
    names = Counter(ticket.client.name for ticket in served_in_turn(fair)[:200])
    assert names == {"a": 150, "b": 50}


def test_long_requests_count_for_more() -> None:
    fair = queue()
    entered(fair, Client("long"), 100, cost=90.0)
    entered(fair, Client("short"), 1000, cost=10.0)
    names = Counter(ticket.client.name for ticket in served_in_turn(fair)[:200])
    assert names == {"long": 20, "short": 180}


def test_what_an_output_cost_is_charged_at_its_end() -> None:
    fair = queue()
    entered(fair, Client("talks"), 100)
    entered(fair, Client("listens"), 100)
    names: Counter[str] = Counter()
    for _ in range(60):
        (ticket,) = fair.admit()
        names[ticket.client.name] += 1
        ticket.spent = 5 if ticket.client.name == "talks" else 1
        fair.leave(ticket)
    assert names == {"talks": 10, "listens": 50}


def test_nobody_saves_up_a_share() -> None:
    fair = queue()
    (first,) = entered(fair, Client("idle"))
    entered(fair, Client("busy"), 100)
    assert fair.admit() == [first]
    fair.leave(first)
    for _ in range(50):
        (ticket,) = fair.admit()
        fair.leave(ticket)
    entered(fair, Client("idle"), 20)
    names = Counter(ticket.client.name for ticket in served_in_turn(fair)[:20])
    assert abs(names["idle"] - names["busy"]) <= 2


def test_a_client_has_its_own_limit_and_others_go_on() -> None:
    fair = queue(10)
    mine = entered(fair, Client("a", max_requests=2), 5)
    others = entered(fair, Client("b"), 3)
    assert set(fair.admit()) == {*mine[:2], *others}
    assert fair.admit() == []
    fair.leave(mine[0])
    assert fair.admit() == [mine[2]]


def test_a_client_at_its_limit_claims_nothing_later() -> None:
    fair = queue(2)
    entered(fair, Client("a", max_requests=1), 200)
    entered(fair, Client("b"), 200)
    first_a, first_b = fair.admit()
    assert (first_a.client.name, first_b.client.name) == ("a", "b")
    for _ in range(50):  # while the first request of a runs on
        fair.leave(first_b)
        (first_b,) = fair.admit()
    entered(fair, Client("a"), 50)  # the limit is lifted
    fair.leave(first_a)
    fair.leave(first_b)
    names = Counter(ticket.client.name for ticket in served_in_turn(fair)[:20])
    assert abs(names["a"] - names["b"]) <= 2


def test_a_wide_request_is_not_overtaken() -> None:
    fair = queue(4)
    narrow = entered(fair, Client("a"), 4)
    fair.admit()
    (wide,) = entered(fair, Client("b"), num_places=4)
    entered(fair, Client("a"), 4)
    for ticket in narrow:
        assert fair.admit() == []
        fair.leave(ticket)
    assert fair.admit() == [wide]
    assert fair.num_served == 4


def test_a_full_queue_refuses_the_newcomer_of_one_client() -> None:
    fair = queue(max_waiting=3)
    entered(fair, Client("a"))
    fair.admit()
    for ticket in entered(fair, Client("a"), 3):
        assert fair.shed(ticket) == []
    (fourth,) = entered(fair, Client("a"))
    assert fair.shed(fourth) == [fourth]
    assert fair.num_waiting == 3


def test_a_full_queue_has_room_for_another_client() -> None:
    fair = queue(max_waiting=4)
    flood = entered(fair, Client("a", weight=1), 4)
    (late,) = entered(fair, Client("b", weight=1))
    assert fair.shed(late) == [flood[3]]
    (later,) = entered(fair, Client("b", weight=1))
    assert fair.shed(later) == [flood[2]]
    (too_many,) = entered(fair, Client("b", weight=1))
    assert fair.shed(too_many) == [too_many], "both have half of it"
    (heavy,) = entered(fair, Client("c", weight=10), num_places=2)
    assert set(fair.shed(heavy)) == {flood[1], later}


def test_a_wide_newcomer_that_is_too_much_itself_costs_nobody_a_place() -> None:
    fair = queue(max_waiting=4)
    entered(fair, Client("a"), 3)
    (wide,) = entered(fair, Client("b"), num_places=4)
    assert fair.shed(wide) == [wide]
    assert fair.num_waiting == 3
    entered(fair, Client("a"))
    (less_wide,) = entered(fair, Client("b"), num_places=3)
    assert fair.shed(less_wide) == [less_wide], "one of the others would not be enough"
    assert fair.num_waiting == 4


def test_bytes_that_wait_are_bounded() -> None:
    fair = queue(max_waiting_bytes=100)
    large = entered(fair, Client("a"), 2, num_bytes=45)
    assert fair.shed(large[1]) == []
    (small,) = entered(fair, Client("b"), num_bytes=20)
    assert fair.shed(small) == [large[1]]
    assert fair.num_waiting_bytes == 65


def test_leaving_twice_does_nothing() -> None:
    fair = queue()
    one, two = entered(fair, Client("a"), 2)
    fair.admit()
    for _ in range(2):
        fair.leave(one)
    fair.leave(two)
    fair.leave(two)
    assert (fair.num_served, fair.num_waiting, fair.num_requests) == (0, 0, 0)
    assert not fair._flows, "nothing is kept of who has gone"


CLIENTS = st.builds(
    Client,
    name=st.sampled_from("abc"),
    weight=st.floats(0.1, 10),
    max_requests=st.none() | st.integers(4, 8),
)


@st.composite
def contests(draw: st.DrawFn) -> tuple[int, list[Client], random.Random]:
    weights = draw(st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
    clients = [Client(str(at), weight) for at, weight in enumerate(weights)]
    return draw(st.integers(1, 6)), clients, random.Random(draw(st.integers()))


@given(contests())
@settings(max_examples=50, deadline=None)
def test_shares_differ_by_no_more_than_a_request(contest: tuple[int, list[Client], random.Random]) -> None:
    """SFQ's bound: over any time in which both always want more, |W_a/w_a - W_b/w_b| <= l_a/w_a + l_b/w_b."""
    num_places, clients, chance = contest
    max_cost = 100.0
    fair = queue(num_places)
    for client in clients:
        entered(fair, client, num_places + 1, cost=chance.uniform(1, max_cost))
    work = dict.fromkeys(clients, 0.0)
    marks: list[dict[Client, float]] = [dict(work)]
    running: list[Ticket] = []
    for _ in range(200):
        for ticket in fair.admit():
            running.append(ticket)
            work[ticket.client] += ticket.cost
            entered(fair, ticket.client, cost=chance.uniform(1, max_cost))
            marks.append(dict(work))
        fair.leave(running.pop(chance.randrange(len(running))))
    for early, late in itertools.combinations(marks[:: max(1, len(marks) // 20)], 2):
        for one, other in itertools.combinations(clients, 2):
            ahead = (late[one] - early[one]) / one.weight - (late[other] - early[other]) / other.weight
            assert abs(ahead) <= max_cost / one.weight + max_cost / other.weight + 1e-6


@given(contests())
@settings(max_examples=50, deadline=None)
def test_shares_of_what_was_spent_differ_by_what_is_running(contest: tuple[int, list[Client], random.Random]) -> None:
    num_places, clients, chance = contest
    max_cost = 100.0
    fair = queue(num_places)
    for client in clients:
        entered(fair, client, num_places + 1)
    spent = dict.fromkeys(clients, 0.0)
    running: list[Ticket] = []
    for _ in range(300):
        for ticket in fair.admit():
            running.append(ticket)
            entered(fair, ticket.client)
        ticket = running.pop(chance.randrange(len(running)))
        ticket.spent = chance.uniform(1, max_cost)
        spent[ticket.client] += ticket.spent
        fair.leave(ticket)
        for one, other in itertools.combinations(clients, 2):
            ahead = spent[one] / one.weight - spent[other] / other.weight
            assert abs(ahead) <= (num_places + 1) * (max_cost / one.weight + max_cost / other.weight)


class AnyCourse(RuleBasedStateMachine):
    """Whatever comes and goes, in whatever order."""

    @initialize(max_served=st.integers(4, 8), max_waiting=st.integers(0, 12), max_bytes=st.integers(0, 100))
    def start(self, max_served: int, max_waiting: int, max_bytes: int) -> None:
        self.limits = (max_served, max_waiting, max_bytes)
        self.fair = queue(max_served, max_waiting, max_bytes)
        self.waiting: list[Ticket] = []
        self.served: list[Ticket] = []

    def admit(self) -> None:
        for ticket in self.fair.admit():
            self.waiting.remove(ticket)
            self.served.append(ticket)

    @rule(client=CLIENTS, num_places=st.integers(1, 4), cost=st.floats(1, 1000), num_bytes=st.integers(0, 60))
    def come(self, client: Client, num_places: int, cost: float, num_bytes: int) -> None:
        ticket = Ticket(client, num_places, cost, num_bytes)
        others = [other for other in self.waiting if other.client.name == client.name]
        self.fair.enter(ticket)
        self.waiting.append(ticket)
        self.admit()
        if self.fair.is_served(ticket):
            assert not set(others) & set(self.waiting), "never before another one of the same client"
            return
        for refused in self.fair.shed(ticket):
            self.waiting.remove(refused)
        self.admit()

    @rule(at=st.integers(0), spent=st.floats(0, 1000))
    def end(self, at: int, spent: float) -> None:
        if self.served:
            ticket = self.served.pop(at % len(self.served))
            ticket.spent = spent
            self.fair.leave(ticket)
            self.admit()

    @rule(at=st.integers(0))
    def give_up(self, at: int) -> None:
        if self.waiting:
            self.fair.leave(self.waiting.pop(at % len(self.waiting)))
            self.admit()

    @rule()
    def everybody_is_served_in_the_end(self) -> None:
        while self.waiting or self.served:
            assert self.served, "a queue that nobody holds up moves on"
            self.end(0, 0)

    @invariant()
    def accounts_balance(self) -> None:
        max_served, max_waiting, max_bytes = self.limits
        fair = self.fair
        assert fair.num_served == sum(ticket.num_places for ticket in self.served) <= max_served
        assert fair.num_waiting == sum(ticket.num_places for ticket in self.waiting) <= max_waiting
        assert fair.num_waiting_bytes == sum(ticket.num_bytes for ticket in self.waiting) <= max_bytes
        assert fair.num_requests == len(self.served) + len(self.waiting)
        assert all(fair.is_served(ticket) for ticket in self.served)
        assert not any(fair.is_served(ticket) for ticket in self.waiting)
        limit_of = {ticket.client.name: ticket.client.max_requests for ticket in self.served}
        for name in limit_of:
            limits = [t.client.max_requests for t in self.served if t.client.name == name]
            if None not in limits:  # each request brings its client's limit of that time
                taken = sum(ticket.num_places for ticket in self.served if ticket.client.name == name)
                assert taken <= max(limit for limit in limits if limit is not None)


TestAnyCourse = AnyCourse.TestCase
