"""A mesh with everything on: API keys, TLS and certificates towards clients, mutual TLS between the services."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from services.mesh import LocalMesh, MeshError, MeshOptions
from services.mesh.health import check_serving
from shared.client import GatewayClient, GenerateOptions
from shared.config import EngineConfig
from shared.errors import UnauthenticatedError, UnavailableError
from shared.tls import TlsFiles, TlsRole
from shared.topology import Topology
from shared.worker_client import fetch_timeline
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from services.mesh import LogLine

pytestmark = pytest.mark.slow

KEY = "alice-secret-0123456789"
ENGINE = EngineConfig(model="synthetic:step_ms=1", topology=Topology(2, 1))


class Certificates:
    """Two authorities: the mesh's own and the public one."""

    def __init__(self, folder: Path) -> None:
        self.mesh = Authority(folder, "mesh")
        self.public = Authority(folder, "public")
        service, gateway, client = self.mesh.pair(), self.public.pair(), self.public.pair("client")
        self.mesh_tls = TlsFiles(service.certificate, service.private_key, self.mesh.file, TlsRole.MESH)
        self.gateway_tls = TlsFiles(gateway.certificate, gateway.private_key, self.public.file, TlsRole.PUBLIC)
        self.client_tls = TlsFiles(client.certificate, client.private_key, self.public.file)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def options(certificates: Certificates, tmp_path: Path) -> MeshOptions:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    return MeshOptions(
        engine=ENGINE, api_keys=str(keys), tls=certificates.gateway_tls, mesh_tls=certificates.mesh_tls, grace_s=2
    )


async def test_all_of_it_at_once(options: MeshOptions, certificates: Certificates) -> None:
    lines: list[LogLine] = []
    async with LocalMesh(options, lines.append) as mesh:
        client_tls = certificates.client_tls.load()
        async with GatewayClient(mesh.gateway_address, api_key=KEY, tls=client_tls) as client:
            chosen = GenerateOptions(max_tokens=5, ignore_eos=True)
            deltas = [delta async for delta in client.generate("hello", chosen)]
            assert sum(len(delta.token_ids) for delta in deltas) == 5
            assert (await client.status()).engine.ready
        async with GatewayClient(mesh.gateway_address, tls=client_tls) as client:
            with pytest.raises(UnauthenticatedError):
                await client.model_info()
        async with GatewayClient(mesh.gateway_address, api_key=KEY) as client:
            with pytest.raises(UnavailableError):
                await client.model_info()
        await check_http(mesh.http_address, certificates)
        await check_inner_ports(mesh, certificates)
        await check_commands(mesh.gateway_address, certificates)
    assert not [line for line in lines if KEY in line.text], "keys are never logged"
    assert not [line for line in lines if line.event == "listening_in_the_clear"]


async def check_http(url: str, certificates: Certificates) -> None:
    """The HTTP front asks for the same certificate and the same key."""
    assert url.startswith("https://")
    files = certificates.client_tls
    context = ssl.create_default_context(cafile=files.authorities)
    anonymous = ssl.create_default_context(cafile=files.authorities)
    context.load_cert_chain(files.certificate, files.private_key)

    def status_of(key: str | None, context: ssl.SSLContext) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        try:
            with urllib.request.urlopen(request, context=context, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert await asyncio.to_thread(status_of, KEY, context) == 200
    assert await asyncio.to_thread(status_of, "wrong", context) == 401
    assert await asyncio.to_thread(status_of, None, context) == 401
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(status_of, KEY, anonymous)


async def check_inner_ports(mesh: LocalMesh, certificates: Certificates) -> None:
    """Scheduler and workers speak with nobody but services of this mesh."""
    mesh_tls = certificates.mesh_tls.load()
    for address in (mesh.scheduler_address, *mesh.worker_addresses.values()):
        await check_serving(address, tls=mesh_tls)
        for tls in (None, TlsFiles(authorities=certificates.mesh.file).load(), certificates.client_tls.load()):
            with pytest.raises(UnavailableError):
                await check_serving(address, tls=tls)
    worker = mesh.worker_addresses[0, 0]
    with pytest.raises(UnavailableError):
        await fetch_timeline(worker)


async def check_commands(address: str, certificates: Certificates) -> None:
    """The command line gets in with a key and certificates, and says what is missing without."""
    files = certificates.client_tls
    with_tls = ("--tls-ca", files.authorities, "--client-cert", files.certificate, "--client-key", files.private_key)
    returncode, output = await orca("status", "--json", "--address", address, *with_tls, key=KEY)
    assert returncode == 0, output
    assert '"ready": true' in output
    returncode, output = await orca("status", "--address", address, *with_tls)
    assert returncode == 1
    assert "ORCA_API_KEY" in output
    returncode, output = await orca("status", "--address", address, key=KEY)
    assert returncode == 1
    assert "--tls-ca" in output
    returncode, output = await orca("health", "--address", address, *with_tls)
    assert (returncode, output.strip()) == (0, "SERVING")


async def orca(*arguments: str, key: str = "") -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "ORCA_API_KEY": key, "COLUMNS": "300"},
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"api_keys": "/absent"}, "--api-keys /absent cannot be read"),
        ({"mesh_tls": TlsFiles("/absent", "/absent", "/absent", TlsRole.MESH)}, "--mesh-tls-cert /absent cannot be"),
        ({"tls": TlsFiles("/absent", "/absent", "", TlsRole.PUBLIC)}, "--tls-cert /absent cannot be read"),
    ],
)
async def test_a_mesh_with_broken_files_does_not_start(broken: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {"engine": ENGINE, **broken}
    with pytest.raises(MeshError, match=said):
        await LocalMesh(MeshOptions(**fields)).start()  # type: ignore[arg-type]
