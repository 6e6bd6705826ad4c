"""A peer's server as a process: started, frozen, stopped with all that it started."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from bench.comparison.server import Server, free_port
from shared.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

SERVER = """
import http.server, json, pathlib, subprocess, sys

child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
pathlib.Path("child").write_text(str(child.pid))

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps({"object": "list", "data": [{"id": "a-model", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(tmp_path: Path, script: str) -> Server:
    port = free_port()
    return Server([sys.executable, "-c", script, str(port)], port, dict(os.environ), tmp_path / "log")


async def test_a_server_with_its_children_is_frozen_thawed_and_stopped(tmp_path: Path) -> None:
    peer = server(tmp_path, SERVER)
    try:
        assert (await peer.start(timeout_s=60)).name == "a-model"
        child = psutil.Process(int((tmp_path / "child").read_text()))
        both = [child, psutil.Process(child.ppid())]
        peer.freeze()
        deadline_s = time.monotonic() + 10
        while any(process.status() != psutil.STATUS_STOPPED for process in both):
            assert time.monotonic() < deadline_s  # A process stops when it would next have run.
        peer.thaw()
        assert all(process.status() != psutil.STATUS_STOPPED for process in both)
        peer.freeze()
    finally:
        await peer.stop()
    assert not peer.is_started
    assert psutil.wait_procs(both, timeout=10)[1] == []


async def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    peer = server(tmp_path, "raise SystemExit(3)")
    with pytest.raises(UnavailableError, match=r"ended with status 3: see .*log"):
        await peer.start(timeout_s=60)
    await peer.stop()


async def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    peer = server(tmp_path, "import sys, signal; signal.pause()")
    with pytest.raises(UnavailableError, match=r"was not ready in 0\.5 s"):
        await peer.start(timeout_s=0.5)
    await peer.stop()
