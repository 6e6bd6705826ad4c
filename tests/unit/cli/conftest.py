"""A gateway client that needs no gateway, a conversation through it, and the command line as a shell would call it."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest
from rich.console import Console

from services.cli.chat_session import ChatSession
from services.cli.conversation import Conversation
from services.cli.main import main
from shared.generation import (
    ChatMessage,
    Delta,
    Finish,
    GatewayStatus,
    GenerateOptions,
    GenerateRequest,
    ModelInfo,
    Usage,
)
from shared.messages import EngineInfo, EngineStatus, FinishReason, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shared.tls import TlsCredentials

INFO = EngineInfo("tiny", 512, 260, 4096, 16, 2, 1, "float32")
STATUS = EngineStatus(
    ready=True,
    reason="",
    epoch=3,
    info=INFO,
    workers=(
        WorkerStatus(0, 0, "127.0.0.1:7001", "ready"),
        WorkerStatus(1, 0, "127.0.0.1:7002", "loading", "weights 40 %"),
    ),
    num_running=2,
    num_waiting=1,
    num_in_flight_steps=2,
    num_used_slots=96,
    num_cached_slots=32,
    num_preempted=1,
    num_preemptions=4,
    num_prompt_tokens=200,
    num_cached_prompt_tokens=50,
    num_steps=77,
    num_output_tokens=1234,
    num_finished=9,
    last_batch_size=2,
    last_batch_tokens=17,
)
ANSWER = (
    Delta("Once ", (5, 6), request_id="r1"),
    Delta("más", (7,)),
    Delta("", (2,), Finish(FinishReason.STOP, 4, 0.5, 1.5, 2.5, stop=2), usage=Usage(3, 4, 1)),
)


class Outcome(NamedTuple):
    exit_code: int
    out: str
    err: str


@dataclass
class FakeGateway:
    """What the fake client answers, and what it was asked."""

    deltas: Sequence[Delta] = ANSWER
    failure: BaseException | None = None
    """Raised by every call, by a stream after its deltas."""
    has_chat_template: bool = True
    status: GatewayStatus = field(default_factory=lambda: GatewayStatus(STATUS, 3))
    requests: list[GenerateRequest] = field(default_factory=list)
    """What ``generate`` was asked."""
    asked: list[tuple[list[ChatMessage], GenerateOptions]] = field(default_factory=list)
    """What ``chat`` was asked."""
    num_cancelled: int = 0
    """Streams that were closed before their end."""
    addresses: list[str] = field(default_factory=list)
    credentials: list[tuple[str | None, TlsCredentials | None]] = field(default_factory=list)
    """API key and TLS of each client."""

    def fail(self) -> None:
        if self.failure is not None:
            raise self.failure


class FakeStream:
    """Stands for ``shared.sync_client.Stream``."""

    def __init__(self, gateway: FakeGateway) -> None:
        self._gateway = gateway
        self._deltas = iter(gateway.deltas)
        self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        for delta in self._deltas:
            return delta
        self._gateway.fail()
        self._has_ended = True
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._gateway.num_cancelled += not self._has_ended


class FakeSyncClient:
    """Stands for ``SyncGatewayClient``."""

    def __init__(
        self, gateway: FakeGateway, address: str, *, api_key: str | None = None, tls: TlsCredentials | None = None
    ) -> None:
        self._gateway = gateway
        gateway.addresses.append(address)
        gateway.credentials.append((api_key, tls))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def generate(self, request: GenerateRequest) -> FakeStream:
        self._gateway.requests.append(request)
        return FakeStream(self._gateway)

    def chat(self, messages: Sequence[ChatMessage], options: GenerateOptions) -> FakeStream:
        self._gateway.asked.append((list(messages), options))
        return FakeStream(self._gateway)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        self._gateway.fail()
        return list(text.encode())

    def model_info(self) -> ModelInfo:
        self._gateway.fail()
        return ModelInfo(INFO, (2,), self._gateway.has_chat_template)

    def status(self) -> GatewayStatus:
        self._gateway.fail()
        return self._gateway.status


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    fake = FakeGateway()
    monkeypatch.setattr("shared.sync_client.SyncGatewayClient", partial(FakeSyncClient, fake))
    return fake


@pytest.fixture
def orca(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Call ``orca`` with arguments; its exit code and output."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        out, err = capsys.readouterr()
        code = left.value.code
        return Outcome(code if isinstance(code, int) else 0 if code is None else 1, out, err)

    return call


class Chat:
    """A session with a fake client; its lines are given, its consoles recorded."""

    def __init__(self, gateway: FakeGateway) -> None:
        from shared.sync_client import SyncGatewayClient  # the fake

        client = SyncGatewayClient("h:1")
        self.gateway = gateway
        self.out, self.notes = io.StringIO(), io.StringIO()
        self.session = ChatSession(
            client,
            client.model_info(),
            GenerateOptions(temperature=0.5),
            Conversation(),
            address="h:1",
            console=Console(file=self.out, width=60),
            notes=Console(file=self.notes, width=60),
        )

    def run(self, *lines: Any, is_script: bool = False) -> int:
        """Read lines (or raise what the terminal would raise), then Ctrl-D."""
        left = [*lines]

        def read() -> str:
            line = left.pop(0) if left else EOFError
            if isinstance(line, str):
                return line
            if isinstance(line, type | BaseException):
                raise line
            done: str = line()
            return done

        return self.session.run(read, is_script=is_script)

    @property
    def asked(self) -> list[list[ChatMessage]]:
        return [messages for messages, _ in self.gateway.asked]

    @property
    def said(self) -> list[str]:
        return self.notes.getvalue().splitlines()


@pytest.fixture
def chat(gateway: FakeGateway) -> Chat:
    return Chat(gateway)
