"""How every service of the mesh speaks gRPC: options of both ends, TLS, error mapping, request ids, health, reflection.

Limits and keepalive stand here once, since a limit set on one end only does nothing, and a ping that the other end does
not permit kills the stream ("too many pings").
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared import errors
from shared.authentication import AuthenticationInterceptor
from shared.failure_details import failure_metadata, retry_after_s
from shared.log import get_logger
from shared.status import StatusCode
from shared.tls import is_loopback
from shared.tracing import TRACEPARENT_KEY, bind_traceparent

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator

    from shared.authentication import Authenticate
    from shared.tls import TlsCredentials

__all__ = [
    "MAX_MESSAGE_BYTES",
    "REQUEST_ID_KEY",
    "RpcServer",
    "bound_address",
    "connect",
    "error_from_rpc",
    "error_of",
    "grpc_status",
    "mapped_errors",
    "request_id_of",
    "status_of",
]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message in either direction."""

REQUEST_ID_KEY = "x-request-id"
"""Metadata key that carries the request id from service to service."""

_GRPC_STATUS: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

_KEEPALIVE_TIME_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 10_000

_MESSAGE_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Neighbours of a mesh come and go: look again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A second server on a taken port must fail, not steal calls.
    ("grpc.so_reuseport", 0),
    # Calls that come faster than Python takes them wait. Of more than 1,000 the library would drop some at random, as
    # CANCELLED, before the service could say that it is full.
    ("grpc.server.max_pending_requests", 10_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    # Pings are permitted more often than any client of ours sends them, also between calls.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # A peer that vanished without a word is noticed.
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
]


def connect(address: str, tls: TlsCredentials | None = None) -> aio.Channel:
    """Open a channel to a service of the mesh, in the clear without ``tls``.

    Connecting itself happens with the first call. With TLS, the server's certificate must be valid for the host of
    ``address``.
    """
    if tls is None:
        return aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.authorities, tls.private_key, tls.certificate)
    return aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


def bound_address(host: str, port: int) -> str:
    """``host:port`` as gRPC wants it, IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def request_id_of(context: aio.ServicerContext[Any, Any]) -> str | None:
    """Request id that the caller put into the metadata, or None."""
    return _metadata(context, REQUEST_ID_KEY)


def _metadata(context: aio.ServicerContext[Any, Any], wanted: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == wanted:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return None


def grpc_status(code: StatusCode) -> grpc.StatusCode:
    """The library's own enum member for one of our codes."""
    return _GRPC_STATUS[code]


def status_of(failure: aio.AioRpcError) -> StatusCode:
    """Status of a failed call."""
    return StatusCode(failure.code().value[0])


_ERROR_KINDS: dict[StatusCode, type[errors.OrcaError]] = {
    kind.code: kind
    for kind in (
        errors.InvalidRequestError,
        errors.ModelNotFoundError,
        errors.AlreadyClaimedError,
        errors.DeadlineExceededError,
        errors.OverloadedError,
        errors.UnauthenticatedError,
        errors.UnavailableError,
        errors.ModelError,
    )
}


def error_of(code: StatusCode, message: str) -> errors.OrcaError:
    """Return the typed error of a status; one that has no type of its own keeps its code (e.g. DATA_LOSS)."""
    kind = _ERROR_KINDS.get(code)
    if kind is not None:
        return kind(message)
    error = errors.OrcaError(message)
    if code is not StatusCode.OK:
        error.code = code
    return error


def error_from_rpc(failure: aio.AioRpcError, what: str) -> errors.OrcaError:
    """Turn a failed call into the typed error that the other side raised; ``what`` names the peer for people."""
    code = status_of(failure)
    if code is StatusCode.UNIMPLEMENTED:
        return error_of(code, f"{what}: what listens there is of another kind or version ({failure.details()})")
    said = failure.details() or code.name
    if code is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in said:
        # The library's own, with the code of overload: trying again would not help.
        return errors.InvalidRequestError(f"{what}: the message is too large ({said})")
    error = error_of(code, f"{what}: {said}")
    if isinstance(error, errors.OverloadedError):
        error.retry_after_s = retry_after_s(failure.trailing_metadata() or ())
    return error


async def _abort(context: aio.ServicerContext[Any, Any], error: BaseException, method: str) -> NoReturn:
    """End the call with the error's own status; what is not ours is logged with its traceback and stays hidden."""
    if isinstance(error, DecodeError):
        error = errors.InvalidRequestError("the request cannot be decoded: it is of another type or version")
    if isinstance(error, errors.OrcaError):
        await context.abort(grpc_status(error.code), str(error), failure_metadata(error))
    get_logger().error("rpc_failed", method=method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the service's log has the details")


@contextlib.asynccontextmanager
async def mapped_errors(context: aio.ServicerContext[Any, Any], method: str) -> AsyncIterator[None]:
    """Wrap a handler's body: typed errors become their status. ``abort`` itself and cancellation pass through."""
    try:
        yield
    except (aio.AbortError, GeneratorExit):
        raise
    except Exception as error:  # noqa: BLE001 - the one place where any failure of a handler becomes a status
        await _abort(context, error, method)


class _ErrorInterceptor(aio.ServerInterceptor):
    """Maps errors to statuses and binds the caller's request id and trace, for every method of a server."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        # Health and reflection map their own errors, and some of their handlers are not coroutines.
        if handler is None or not method.startswith("/orca."):
            return handler
        # To the library all take a stream of requests: it leaves a call without its one request unanswered.
        if handler.response_streaming:

            async def stream(requests: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
                with _bound_caller(context):
                    async with mapped_errors(context, method):
                        if handler.request_streaming:
                            responses = handler.stream_stream(requests, context)
                        else:
                            responses = handler.unary_stream(await _only(requests), context)
                        try:
                            async for response in responses:
                                yield response
                        finally:
                            await responses.aclose()

            return grpc.stream_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )

        async def unary(requests: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            with _bound_caller(context):
                async with mapped_errors(context, method):
                    if handler.request_streaming:
                        return await handler.stream_unary(requests, context)
                    return await handler.unary_unary(await _only(requests), context)

        return grpc.stream_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)


async def _only(requests: AsyncIterable[Any]) -> Any:
    """Return the one request of a call. Raises ``InvalidRequestError`` where there is none."""
    async for request in requests:
        return request
    raise errors.InvalidRequestError("the call has ended without a request")


@contextlib.contextmanager
def _bound_caller(context: aio.ServicerContext[Any, Any]) -> Iterator[None]:
    """Bind what a caller tells of itself to the call: its trace, and its request id to the logs."""
    bind_traceparent(_metadata(context, TRACEPARENT_KEY) or "")
    request_id = request_id_of(context)
    if request_id is None:
        yield
        return
    with structlog.contextvars.bound_contextvars(request_id=request_id):
        yield


class RpcServer:
    """A gRPC server with error mapping, ``grpc.health.v1`` and reflection.

    It listens as soon as it starts, but its health is NOT_SERVING until ``set_ready``: readiness is a statement of the
    service, not of the socket.
    """

    def __init__(
        self,
        *,
        max_concurrent_rpcs: int | None = None,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        tls: TlsCredentials | None = None,
        authenticate: Authenticate | None = None,
    ) -> None:
        """With ``tls``, clients must show a certificate where its ``authorities`` are given.

        ``authenticate`` is asked for every call but the health service's (`shared.authentication`).
        """
        gate = [] if authenticate is None else [AuthenticationInterceptor(authenticate)]
        self._tls = tls
        self._server = aio.server(
            interceptors=[*gate, _ErrorInterceptor()],
            options=[*_SERVER_OPTIONS, ("grpc.max_receive_message_length", max_request_bytes)],
            maximum_concurrent_rpcs=max_concurrent_rpcs,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []
        self.port: int | None = None

    def add(self, register: Callable[[Any, aio.Server], None], servicer: object, full_name: str) -> None:
        """Add a servicer by its generated ``add_…_to_server`` function; ``full_name`` is like ``orca.v1.Worker``."""
        register(servicer, self._server)
        self._names.append(full_name)

    async def start(self, host: str, port: int) -> int:
        """Listen at ``host:port`` (0: any free port) and return the port. Raises ``ConfigError`` where it is taken."""
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        await self.set_ready(ready=False)
        address = bound_address(host, port)
        try:
            bound_port = self._bind(address)
        except RuntimeError as failure:
            raise errors.ConfigError(
                f"cannot listen at {address}: the port is in use or the address is not this host's; "
                f"stop the other program or choose another port (0 takes any free one)"
            ) from failure
        await self._server.start()
        if self._tls is None and not is_loopback(host):
            advice = "whoever reaches this port can read along and call: keep it private, or switch TLS on"
            get_logger().warning("listening_in_the_clear", address=bound_address(host, bound_port), advice=advice)
        self.port = bound_port
        return bound_port

    def _bind(self, address: str) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(address)
        assert self._tls.private_key is not None
        assert self._tls.certificate is not None
        credentials = grpc.ssl_server_credentials(
            [(self._tls.private_key, self._tls.certificate)],
            root_certificates=self._tls.authorities,
            require_client_auth=self._tls.authorities is not None,
        )
        return self._server.add_secure_port(address, credentials)

    async def set_ready(self, *, ready: bool) -> None:
        """Publish readiness to all who ask or watch."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
