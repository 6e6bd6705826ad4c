"""What one gateway costs: ``python -m bench.gateway_cost``.

A gateway runs by itself, pinned to one core. Everything else, the engine that it serves and the clients, is one other
process: the engine is a scheduler without a model that sends one message with a token of each request per iteration, at
a set rate. So the two clocks are the same one, and the time from the engine's send to a client's receipt is what the
gateway adds (and what the load itself costs, which the numbers include).

Prints one JSON line for each measurement: tokens per second that clients received, messages or events they came in,
latency added per token, and the gateway's share of its core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import uvloop
from grpc import aio

from shared.codec.session import session_events_to_pb, session_request_from_pb
from shared.messages import Cancel, Ended, EngineInfo, FinishReason, SessionEvents, Submit
from shared.pb import gateway_pb2, scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from shared.ids import Handle

ENGINE = EngineInfo(
    model="synthetic:",
    max_model_len=4096,
    vocab_size=300,
    num_slots=1 << 20,
    block_size=16,
    num_stages=1,
    tp_size=1,
    dtype="float32",
)
TOKEN_ID = ord("a")
"""Each token is one character, so that clients can count tokens in text."""


class Engine:
    """Gives each request its tokens at a common pace, and remembers when it sent which."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self.arrived = asyncio.Event()
        """Set once all requests are here."""
        self.running: dict[Handle, tuple[int, list[float]]] = {}
        self.sent_at: dict[str, list[float]] = {}
        """By request id: when each token left."""

    async def session(
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[scheduler_pb2.SessionEvents]:
        """Take requests, send events."""
        del context
        await anext(aiter(request_iterator))
        yield session_events_to_pb(SessionEvents(engine_ready=ENGINE))
        self.events: asyncio.Queue[SessionEvents] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield session_events_to_pb(await self.events.get())
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[scheduler_pb2.SessionRequest]) -> None:
        async for message in requests:
            match session_request_from_pb(message):
                case Submit() as submit:
                    self.running[submit.handle] = submit.max_tokens, self.sent_at.setdefault(submit.request_id, [])
                    if len(self.running) == self._num_requests:
                        self.arrived.set()
                case Cancel() as cancel:
                    self.running.pop(cancel.handle, None)
                case _:
                    raise AssertionError("a second Hello")

    async def run(self, rate: float) -> None:
        """Serve until all requests have ended, ``rate`` tokens a second of all together."""
        interval = self._num_requests / rate
        due = time.monotonic()
        while self.running:
            now = time.monotonic()
            ended = []
            for handle, (max_tokens, sent_at) in self.running.items():
                sent_at.append(now)
                if len(sent_at) == max_tokens:
                    ended.append(Ended(handle, FinishReason.LENGTH))
            handles = list(self.running)
            for end in ended:
                del self.running[end.handle]
            self.events.put_nowait(SessionEvents(handles, [TOKEN_ID] * len(handles), ended))
            due += interval
            await asyncio.sleep(max(0.0, due - time.monotonic()))


@dataclass
class Received:
    """What one client got."""

    times: list[float] = field(default_factory=list)
    """When each token came."""
    num_messages: int = 0


async def read_grpc(channel: aio.Channel, name: str, max_tokens: int) -> Received:
    """Stream over gRPC. Messages are not decoded here: text is found by its length, which keeps the load cheap."""
    request = gateway_pb2.GenerateRequest(
        request_id=name,
        prompts=[gateway_pb2.Prompt(text="hello")],
        options=gateway_pb2.GenerationOptions(max_tokens=max_tokens),
    )
    received = Received()
    call: Any = channel.unary_stream(
        "/orca.v1.Gateway/Generate",
        request_serializer=gateway_pb2.GenerateRequest.SerializeToString,
        response_deserializer=None,
    )(request)
    async for message in call:
        tag = message.find(b"\x1a")  # text_delta, field 3
        if tag >= 0 and not message.startswith(b"\x0a"):
            received.num_messages += 1
            received.times += [time.monotonic()] * message[tag + 1]
    return received


async def read_sse(host: str, port: int, name: str, max_tokens: int) -> Received:
    """Stream over HTTP as server-sent events, read as lines."""
    body = json.dumps({"model": "synthetic:", "prompt": "hello", "max_tokens": max_tokens, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: {name}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    received = Received()
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read(1000)!r}")
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            break
        start = line.find(b'"text":"') + 8
        num_tokens = line.find(b'"', start) - start if start >= 8 else 0
        if num_tokens:
            received.num_messages += 1
            received.times += [time.monotonic()] * num_tokens
    writer.close()
    return received


@contextlib.asynccontextmanager
async def gateway(scheduler: str, core: int) -> AsyncIterator[tuple[psutil.Process, str, tuple[str, int]]]:
    """Run a gateway on one core; gives its process, its gRPC address and its HTTP address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "services.cli", "gateway", "--scheduler", scheduler),
        *("--port", "0", "--http-port", "0", "--log-format", "json"),
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stderr is not None
    addresses: dict[str, str] = {}
    try:
        while len(addresses) < 2:
            line = await process.stderr.readline()
            if not line:
                raise RuntimeError("the gateway did not start")
            event = json.loads(line)
            if event["event"] in {"service_listening", "http_listening"}:
                addresses[event["event"]] = event["address"]
        drain = asyncio.create_task(_drain(process.stderr))
        host, _, port = addresses["http_listening"].rpartition(":")
        yield psutil.Process(process.pid), addresses["service_listening"], (host.removeprefix("http://"), int(port))
        drain.cancel()
    finally:
        process.terminate()
        await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


async def measure(front: str, rate: float, num_streams: int, seconds: float) -> dict[str, Any]:
    """Stream over one front at ``rate`` tokens a second in all."""
    max_tokens = int(rate * seconds / num_streams)
    engine, server = Engine(num_streams), aio.server()
    session = grpc.stream_stream_rpc_method_handler(
        engine.session, scheduler_pb2.SessionRequest.FromString, scheduler_pb2.SessionEvents.SerializeToString
    )
    server.add_registered_method_handlers("orca.v1.Scheduler", {"Session": session})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[1:]))
    try:
        async with (
            gateway(f"127.0.0.1:{port}", cores[0]) as (process, grpc_address, http_address),
            aio.insecure_channel(grpc_address) as channel,
        ):
            await _ready(channel)

            def read(name: str) -> Any:
                if front == "grpc":
                    return read_grpc(channel, name, max_tokens)
                return read_sse(*http_address, name, max_tokens)

            clients = [asyncio.create_task(read(f"stream-{index}")) for index in range(num_streams)]
            await engine.arrived.wait()
            run = asyncio.create_task(engine.run(rate))
            started, before = time.monotonic(), sum(process.cpu_times()[:2])
            received = await asyncio.gather(*clients)
            busy = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)
            await run
    finally:
        os.sched_setaffinity(0, set(cores))
        await server.stop(0)
    added = sorted(
        at - sent
        for index, stream in enumerate(received)
        for sent, at in zip(engine.sent_at[f"stream-{index}"], stream.times, strict=True)
    )
    duration = max(stream.times[-1] for stream in received) - min(stream.times[0] for stream in received)
    num_tokens = sum(len(stream.times) for stream in received)
    return {
        "measurement": "gateway_cost",
        "front": front,
        "streams": num_streams,
        "offered_tokens_s": round(rate),
        "tokens_s": round(num_tokens / duration),
        "messages_s": round(sum(stream.num_messages for stream in received) / duration),
        "added_ms_p50": round(1e3 * added[len(added) // 2], 2),
        "added_ms_p99": round(1e3 * added[int(0.99 * len(added))], 2),
        "core_used": round(busy, 2),
    }


async def _ready(channel: aio.Channel) -> None:
    status = channel.unary_unary(
        "/orca.v1.Gateway/GetModelInfo",
        request_serializer=gateway_pb2.GetModelInfoRequest.SerializeToString,
        response_deserializer=gateway_pb2.GetModelInfoResponse.FromString,
    )
    while True:
        with contextlib.suppress(aio.AioRpcError):
            await status(gateway_pb2.GetModelInfoRequest(), wait_for_ready=True)
            return
        await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fronts", nargs="+", default=["grpc", "sse"], choices=["grpc", "sse"])
    parser.add_argument("--rates", type=float, nargs="+", default=[5000, 10000, 12000], help="tokens a second in all")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    run: Callable[..., dict[str, Any]] = lambda *args: uvloop.run(measure(*args))  # noqa: E731
    for front in arguments.fronts:
        for rate in arguments.rates:
            print(json.dumps(run(front, rate, arguments.streams, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
