"""Both clients of the gateway, over real gRPC."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from shared.client import GatewayClient
from shared.completion import collect, collect_async
from shared.errors import (
    InvalidRequestError,
    ModelError,
    OrcaError,
    OverloadedError,
    ProtocolError,
    UnauthenticatedError,
    UnavailableError,
)
from shared.generation import (
    ChatMessage,
    ChatRequest,
    Delta,
    GenerateOptions,
    GenerateRequest,
    Guidance,
    GuidanceKind,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from shared.status import StatusCode
from shared.sync_client import SyncGatewayClient
from tests.fakes.fake_gateway import ANSWER, SNAPSHOT, FakeGateway, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OPTIONS = GenerateOptions(
    max_tokens=9,
    temperature=0.5,
    top_k=4,
    top_p=0.25,
    min_p=0.125,
    seed=2**64 - 1,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias={7: -100.0, 8: 1.5},
    stop=("a", "b"),
    stop_token_ids=(3, 0),
    ignore_eos=True,
    min_tokens=2,
    n=3,
    best_of=4,
    num_logprobs=0,
    guidance=Guidance(GuidanceKind.CHOICES, choices=("yes", "no")),
    timeout_s=1.5,
)
CONVERSATION = ChatRequest(
    [
        ChatMessage("user", "what time is it?", name="ann"),
        ChatMessage("assistant", tool_calls=(ToolCall("c1", "clock", "{}"),)),
        ChatMessage("tool", "noon", tool_call_id="c1"),
    ],
    OPTIONS,
    tools=[Tool("clock", "the time", '{"type":"object"}')],
    tool_choice=ToolChoice(ToolMode.NAMED, "clock"),
    continue_final_message=True,
    request_id="mine",
)


class AsyncCalls:
    """The asyncio client, called as if it were the other one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            async with GatewayClient(self._address) as client:
                called = getattr(client, name)(*args, **kwargs)
                return await called if inspect.isawaitable(called) else [delta async for delta in called]

        return lambda *args, **kwargs: asyncio.run(call(*args, **kwargs))


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving(FakeGateway()) as gateway:
        yield gateway


@pytest.fixture(params=["asyncio", "threads"])
def client(request: pytest.FixtureRequest, gateway: FakeGateway) -> Iterator[Any]:
    if request.param == "asyncio":
        yield AsyncCalls(gateway.address)
    else:
        with SyncGatewayClient(gateway.address) as client:
            yield client


def test_deltas_arrive_as_they_were_sent(client: Any) -> None:
    assert list(client.generate("a prompt")) == list(ANSWER)
    assert list(client.chat([ChatMessage("user", "hello")])) == list(ANSWER)


@pytest.mark.parametrize("prompt", ["a prompt", [1, 2, 3]])
def test_a_prompt_arrives_with_its_options(client: Any, gateway: FakeGateway, prompt: str | Sequence[int]) -> None:
    list(client.generate(prompt, OPTIONS, request_id="mine"))
    (asked,) = gateway.asked
    assert isinstance(asked, GenerateRequest)
    (arrived,) = asked.prompts
    assert (arrived if isinstance(arrived, str) else list(arrived)) == prompt
    assert asked == GenerateRequest(asked.prompts, OPTIONS, request_id="mine")


def test_whole_requests_arrive_with_all_that_is_in_them(client: Any, gateway: FakeGateway) -> None:
    request = GenerateRequest(["one", "two"], OPTIONS, echo=True, request_id="first")
    list(client.generate(request))
    list(client.generate(request, GenerateOptions(max_tokens=1), request_id="second"))
    list(client.chat(CONVERSATION))
    other = GenerateRequest(["one", "two"], GenerateOptions(max_tokens=1), echo=True, request_id="second")
    assert gateway.asked == [request, other, CONVERSATION]


def test_short_calls(client: Any) -> None:
    assert client.tokenize("ab") == [257, 97, 98]
    assert client.tokenize("ab", add_special_tokens=False) == [97, 98]
    assert client.detokenize([97, 98]) == "ab"
    assert client.model_info().engine.model == "tiny"
    assert client.status().num_gateway_requests == 1


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (InvalidRequestError("top_p is 3"), InvalidRequestError),
        (OverloadedError("full"), OverloadedError),
        (UnavailableError("draining"), UnavailableError),
        (UnauthenticatedError("who is it?"), UnauthenticatedError),
        (ModelError("no template"), ModelError),
    ],
)
@pytest.mark.parametrize("call", ["generate", "chat", "tokenize", "detokenize", "model_info", "status"])
def test_failures_are_typed(
    client: Any, gateway: FakeGateway, call: str, failure: OrcaError, kind: type[OrcaError]
) -> None:
    gateway.failure = failure
    arguments: dict[str, list[Any]] = {"generate": ["x"], "chat": [[]], "tokenize": ["x"], "detokenize": [[97]]}
    with pytest.raises(kind) as raised:
        list(getattr(client, call)(*arguments.get(call, [])))
    assert type(raised.value) is kind
    assert str(raised.value) == f"gateway at {gateway.address}: {failure}"


def test_snapshots(client: Any) -> None:
    (snapshot,) = client.watch(0.5)
    assert snapshot == SNAPSHOT
    with pytest.raises(InvalidRequestError):
        list(client.watch(-1))


def test_an_api_key_goes_along_with_every_call(gateway: FakeGateway) -> None:
    async def call_all() -> None:
        async with GatewayClient(gateway.address, api_key="s3cret") as client:
            await client.status()
            await collect_async(client.generate("x"))

    asyncio.run(call_all())
    with SyncGatewayClient(gateway.address, api_key="s3cret") as client:
        client.status()
        collect(client.generate("x"))
    assert [metadata["authorization"] for metadata in gateway.metadata] == ["Bearer s3cret"] * 4


@pytest.mark.parametrize(
    "options", [GenerateOptions(seed=-1), GenerateOptions(seed=2**64), GenerateOptions(stop_token_ids=(-1,))]
)
def test_what_fits_into_no_message_is_refused_here(client: Any, gateway: FakeGateway, options: GenerateOptions) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        list(client.generate("x", options))
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        client.detokenize([-1])
    assert gateway.asked == []


def test_a_deadline_of_the_call(client: Any, gateway: FakeGateway) -> None:
    gateway.hangs = True
    with pytest.raises(OrcaError) as raised:
        list(client.generate("x", timeout_s=0.05))
    assert raised.value.code is StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("name", ["generate", "chat", "tokenize", "detokenize", "model_info", "status", "watch"])
def test_both_clients_are_called_alike(name: str) -> None:
    parameters = [inspect.signature(getattr(kind, name)).parameters for kind in (GatewayClient, SyncGatewayClient)]
    assert parameters[0] == parameters[1]
    assert inspect.signature(GatewayClient).parameters == inspect.signature(SyncGatewayClient).parameters


# --- giving up --------------------------------------------------------------------------------------------------------


async def test_closing_the_iterator_cancels(gateway: FakeGateway) -> None:
    gateway.hangs = True
    async with GatewayClient(gateway.address) as client, aclosing(client.generate("x")) as deltas:
        assert await anext(deltas) == ANSWER[0]
    await asyncio.to_thread(gateway.cancelled.get, timeout=10)


def test_closing_the_stream_cancels(gateway: FakeGateway) -> None:
    gateway.hangs = True
    with SyncGatewayClient(gateway.address) as client:
        with client.generate("x") as deltas:
            assert next(deltas) == ANSWER[0]
        gateway.cancelled.get(timeout=10)
        assert list(deltas) == [], "a closed stream has nothing more"


def test_dropping_the_stream_cancels(gateway: FakeGateway) -> None:
    gateway.hangs = True
    with SyncGatewayClient(gateway.address) as client:
        for delta in client.generate("x"):
            assert delta == ANSWER[0]
            break
        del delta
        gc.collect()
        gateway.cancelled.get(timeout=10)


@pytest.mark.parametrize("closes_client", [False, True], ids=["stream", "client"])
def test_another_thread_may_end_it(gateway: FakeGateway, closes_client: bool) -> None:
    gateway.hangs = True
    client = SyncGatewayClient(gateway.address)
    deltas = client.generate("x")
    got: list[Delta] = []
    has_all = threading.Event()

    def read() -> StatusCode:
        try:
            for delta in deltas:
                got.append(delta)
                if len(got) == len(ANSWER):
                    has_all.set()
        except OrcaError as error:
            return error.code
        return StatusCode.OK

    with ThreadPoolExecutor(1) as pool, client:
        reader = pool.submit(read)
        assert has_all.wait(10)
        (client if closes_client else deltas).close()
        assert reader.result(10) is StatusCode.CANCELLED
        gateway.cancelled.get(timeout=10)
    assert got == list(ANSWER)


def test_an_interrupt_leaves_the_client_whole(gateway: FakeGateway) -> None:
    def read_interrupted(client: SyncGatewayClient, pool: ThreadPoolExecutor, num_before: int) -> None:
        with client.generate("x") as deltas:
            for index, _ in enumerate(deltas):
                if index == num_before:
                    pool.submit(os.kill, os.getpid(), signal.SIGINT)

    with SyncGatewayClient(gateway.address) as client, ThreadPoolExecutor(1) as pool:
        for index in range(20):
            gateway.hangs = True
            with pytest.raises(KeyboardInterrupt):
                read_interrupted(client, pool, index % len(ANSWER))
            gateway.cancelled.get(timeout=10)
            gateway.hangs = False
            assert collect(client.generate("x")).text == "Once más"


def test_a_program_that_forgets_to_close_still_ends(gateway: FakeGateway) -> None:
    gateway.hangs = True
    program = (
        "import sys\n"
        "from shared.sync_client import SyncGatewayClient\n"
        "deltas = SyncGatewayClient(sys.argv[1]).generate('x')\n"
        "print(next(deltas).request_id)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, gateway.address], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "r1\n", "")
    gateway.cancelled.get(timeout=10)


def test_a_slow_reader_gets_all(gateway: FakeGateway) -> None:
    gateway.deltas = [*ANSWER[:-1], *(Delta(str(index), (index,)) for index in range(500)), ANSWER[-1]]
    with SyncGatewayClient(gateway.address) as client:
        assert list(client.generate("x")) == gateway.deltas


def test_a_closed_client_says_so(gateway: FakeGateway) -> None:
    with SyncGatewayClient(gateway.address) as client:
        assert client.detokenize([97]) == "a"
    for call in (client.model_info, client.status, lambda: client.tokenize("x"), lambda: list(client.generate("x"))):
        with pytest.raises(UnavailableError, match="this client is closed"):
            call()


async def test_a_closed_asyncio_client_says_so(gateway: FakeGateway) -> None:
    async with GatewayClient(gateway.address) as client:
        assert await client.detokenize([97]) == "a"
    with pytest.raises(UnavailableError, match="this client is closed"):
        await client.model_info()


# --- many at once -----------------------------------------------------------------------------------------------------


def test_threads_may_share_a_client(gateway: FakeGateway) -> None:
    with SyncGatewayClient(gateway.address) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda index: collect(client.generate(f"prompt {index}")).text, range(32)))
    assert texts == ["Once más"] * 32
    asked = [request.prompts[0] for request in gateway.asked if isinstance(request, GenerateRequest)]
    assert sorted(map(str, asked)) == sorted(f"prompt {index}" for index in range(32))


async def test_tasks_may_share_a_client(gateway: FakeGateway) -> None:
    async with GatewayClient(gateway.address) as client:
        completions = await asyncio.gather(*(collect_async(client.generate(str(index))) for index in range(16)))
    assert {completion.text for completion in completions} == {"Once más"}


async def test_an_answer_that_is_not_whole_is_no_answer(gateway: FakeGateway) -> None:
    gateway.deltas = ANSWER[:-1]
    async with GatewayClient(gateway.address) as client:
        with pytest.raises(ProtocolError, match="ended before"):
            await collect_async(client.generate("x"))
