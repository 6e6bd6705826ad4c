"""The command line and the README's programs against a whole mesh, as a user has them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.config import EngineConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RANDOM_MODEL = EngineConfig(model="random:tiny-llama")


class Done(NamedTuple):
    exit_code: int
    out: str
    err: str


async def run(*command: str, script: str = "") -> Done:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, err = await asyncio.wait_for(process.communicate(script.encode()), 60)
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


async def test_a_conversation_from_a_script(tmp_path: Path) -> None:
    script = f"""
/system be brief
/set max-tokens 8
/set ignore-eos on
/set seed 5
first\\
question
/retry
second question
/undo
/set regex [a-c]{{4}}
/set ignore-eos off
third question
/tokens
/save {tmp_path}/conversation
/load {tmp_path}/conversation
/quit
never read
"""
    async with LocalMesh(MeshOptions(engine=RANDOM_MODEL)) as mesh:
        done = await run("-m", "services.cli", "chat", "--address", mesh.gateway_address, script=script)
    assert done.exit_code == 0, done.err
    saved = json.loads((tmp_path / "conversation").read_text(encoding="utf-8"))
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    system, question, answer, _, guided = (message["content"] for message in saved)
    assert (system, question) == ("be brief", "first\nquestion")
    assert re.fullmatch("[a-c]{4}", guided)
    assert done.out.startswith(f"{answer}\n{answer}\n"), "the same question with the same seed"
    assert done.out.endswith(f"{guided}\n")
    assert "last answer: " in done.err
    assert "(5 messages read)" in done.err


async def test_outputs_of_one_command() -> None:
    async with LocalMesh(MeshOptions(engine=RANDOM_MODEL)) as mesh:

        async def generate(*options: str) -> Done:
            address = ("--address", mesh.gateway_address)
            return await run("-m", "services.cli", "generate", "once", "-n", "6", "--ignore-eos", *options, *address)

        alone, again = [await generate("--seed", "3", "--json", "--logprobs", "1", "--echo") for _ in range(2)]
        several = await generate("--n", "2", "--temperature", "0", "--logprobs", "0")
        impossible = await generate("--logit-bias", "999999=1")
        late = await generate("--timeout", "0.0001")
    assert alone.exit_code == 0, alone.err
    deltas = [json.loads(line) for line in alone.out.splitlines()]
    text, token_ids = ([delta[name] for delta in deltas] for name in ("text", "token_ids"))
    assert "".join(text).startswith("once")
    assert sum(map(len, token_ids)) == deltas[-1]["usage"]["num_prompt_tokens"] + 6
    assert sum(len(delta.get("logprobs", ())) for delta in deltas) == sum(map(len, token_ids))
    assert deltas[-1]["finish"]["reason"] == "length"
    assert [json.loads(line)["text"] for line in again.out.splitlines()] != []
    assert "".join(json.loads(line)["text"] for line in again.out.splitlines()) == "".join(text)
    assert several.exit_code == 0, several.err
    _, first, second = re.split("─+ choice [12] of 2 ─+\n", several.out)
    assert first == second, "greedy choices are equal"
    assert "probability" in first
    assert (impossible.exit_code, impossible.out) == (1, "")
    assert "logit_bias" in impossible.err
    assert late.exit_code == 1
    assert "timeout" in late.err


async def test_the_programs_of_the_readme_run() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## From Python")[2].partition("\n## ")[0]
    programs = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(programs) == 2
    async with LocalMesh(MeshOptions(engine=RANDOM_MODEL)) as mesh:
        for program in programs:
            assert "127.0.0.1:50051" in program
            done = await run("-c", program.replace("127.0.0.1:50051", mesh.gateway_address))
            assert (done.exit_code, done.err) == (0, "")
            assert done.out
