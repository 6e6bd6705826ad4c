"""The client that an endpoint's URL asks for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from bench.load.endpoint import ServedModel
from bench.load.request_options import RequestOptions
from shared.errors import ConfigError, ModelNotFoundError, UnavailableError
from shared.tls import TlsCredentials, load_tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.load.endpoint import Endpoint, LoadClient

__all__ = ["find_model", "open_client"]

_ANSWER_S = 10.0
"""For a list of models."""


@contextlib.asynccontextmanager
async def open_client(endpoint: Endpoint, options: RequestOptions) -> AsyncIterator[LoadClient]:
    """Open a client for as long as the block lasts; it connects with its first call.

    Raises:
        ConfigError: TLS files cannot work, or the endpoint has no place for an option.
    """
    if endpoint.is_grpc:
        from bench.load.gateway_client import GatewayLoadClient
        from shared.client import GatewayClient

        if options.extra_body:
            raise ConfigError("gRPC has no body to which --extra-body could add anything")
        tls = load_tls(endpoint.tls) or (TlsCredentials() if endpoint.scheme == "grpcs" else None)
        async with GatewayClient(endpoint.address, api_key=endpoint.api_key or None, tls=tls) as gateway:
            yield GatewayLoadClient(gateway, options)
    else:
        from bench.load.http_client import HttpClient
        from bench.load.openai_client import OpenAiClient

        async with HttpClient(endpoint) as http:
            yield OpenAiClient(http, options)


async def find_model(endpoint: Endpoint, name: str = "") -> ServedModel:
    """Return the model called ``name``, or the first one that the endpoint lists; what it does not tell is None.

    Raises:
        ModelNotFoundError: it lists others.
        ConfigError: it lists none, and none is named.
        OrcaError: the endpoint is not there or refuses.
    """
    async with open_client(endpoint, RequestOptions(name)) as client:
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await client.models()
        except TimeoutError as error:
            raise UnavailableError(f"{endpoint.url} did not answer within {_ANSWER_S:g} s") from error
    if not found and not name:
        raise ConfigError(f"{endpoint.url} does not tell which models it serves: name one with --model")
    for model in found:
        if name in {"", model.name}:
            return model
    if found:
        names = ", ".join(model.name for model in found[:10])
        raise ModelNotFoundError(f"{endpoint.url} serves no model {name!r}; it has: {names}")
    return ServedModel(name)
