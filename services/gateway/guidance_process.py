"""The process that tries grammars out: whatever one does to the library, the gateway goes on.

Both ends are here: `GuidanceProcess` in the gateway, ``main`` in the process. They exchange frames, a length of four
bytes and so many bytes: down the vocabulary as JSON, then grammars; up an empty frame once the vocabulary has been
read, then for each grammar why it is no good, empty where it is.

A grammar that takes too much processor time ends the process, by the kernel's own timer: no other way stops the library
in mid-work. So does one that takes too much memory. The process ends with its standard input, hence with the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import struct
import sys
from typing import TYPE_CHECKING, BinaryIO

from shared.errors import InvalidRequestError, UnavailableError
from shared.text.guidance_vocabulary import GuidanceVocabulary, guidance_matcher

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from llguidance import LLTokenizer

__all__ = ["GuidanceProcess"]

_MAX_MEMORY_BYTES = 2 << 30
"""Of address space; the process itself takes about 0.3 GiB."""
_NICENESS = 10
_MAX_REASON_CHARACTERS = 500
_START_TIMEOUT_S = 60.0
_CHECK_TIMEOUT_S = 30.0
"""Not the limit of a grammar, which is processor time, but of a process that does not run at all."""
_LENGTH = struct.Struct(">I")
_OWN_FAULT = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP}
"""What ends a process that has run out of memory, of stack, or into a fault of the library's."""


class GuidanceProcess:
    """The gateway's end: one check at a time."""

    def __init__(self, process: Process, max_cpu_s: float) -> None:
        self._process = process
        self._max_cpu_s = max_cpu_s
        self.is_usable = True
        """False once a check has ended the process, or has been given up."""

    @classmethod
    async def start(cls, vocabulary: GuidanceVocabulary, *, max_cpu_s: float) -> GuidanceProcess:
        """Start it (0.5 s for 50,000 tokens); ``max_cpu_s`` is for each grammar.

        Raises:
            ModelError: the library cannot take the vocabulary.
            UnavailableError: the process does not start.
        """
        process = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # modules of the project, not of the folder where the gateway was started
                "-m",
                __name__,
                str(max_cpu_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # What the library has to say when it crashes may quote the grammar.
                stderr=asyncio.subprocess.DEVNULL,
            ),
            max_cpu_s,
        )
        try:
            await process._ask(_vocabulary_frame(vocabulary), _START_TIMEOUT_S)
        except BaseException:
            await process.close()
            raise
        if not process.is_usable:
            await process.close()
            raise UnavailableError("the process that checks guidance did not start; try again in a moment")
        return process

    async def check(self, grammar: str) -> str:
        """Return why ``grammar`` is no good, empty where it is.

        Raises:
            UnavailableError: somebody else ended the process, or it did not run.
        """
        reason = await self._ask(grammar.encode(), _CHECK_TIMEOUT_S)
        if reason is not None:
            return reason
        returncode = await self._process.wait()
        if returncode == -signal.SIGPROF:
            return f"it takes more than {self._max_cpu_s:g} s of processor time to compile; simplify it"
        if -returncode in _OWN_FAULT:
            return "it takes too much memory to compile; simplify it"
        raise UnavailableError("the process that checks guidance was ended; try again")

    async def close(self) -> None:
        """End it."""
        self.is_usable = False
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _ask(self, frame: bytes, timeout_s: float) -> str | None:
        """Return the answer, None where the process has ended; one that was not waited for makes it unusable."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        usable, self.is_usable = self.is_usable, False
        assert usable
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(_LENGTH.pack(len(frame)) + frame)
                await self._process.stdin.drain()
                (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
                answer = (await self._process.stdout.readexactly(length)).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except TimeoutError as error:
            raise UnavailableError("the process that checks guidance does not run; try again") from error
        self.is_usable = True
        return answer


def _vocabulary_frame(vocabulary: GuidanceVocabulary) -> bytes:
    tokens = [token.decode("latin-1") for token in vocabulary.tokens]
    return json.dumps([tokens, vocabulary.special_ids, vocabulary.eos_ids]).encode()


def _vocabulary_of(frame: bytes) -> GuidanceVocabulary:
    tokens, special_ids, eos_ids = json.loads(frame)
    return GuidanceVocabulary(tuple(token.encode("latin-1") for token in tokens), tuple(special_ids), tuple(eos_ids))


def _reason(tokens: LLTokenizer, grammar: str) -> str:
    """Why it is no good, empty where it is."""
    try:
        matcher = guidance_matcher(tokens, grammar)
    except InvalidRequestError as error:
        return str(error)[:_MAX_REASON_CHARACTERS] or "the library does not say why"
    matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    if matcher.stop_reason().startswith("NoExtension") or matcher.get_error().startswith("NoExtension"):
        return "nothing can ever match it"
    return matcher.get_error()[:_MAX_REASON_CHARACTERS]


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    frame = stream.read(length)
    return frame if len(frame) == length else None


def _write(stream: BinaryIO, text: str) -> None:
    frame = text.encode("utf-8", "replace")
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def _limit(kind: int, value: int) -> None:
    """Lower a limit of this process; one that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def main() -> None:
    """Serve the gateway at standard input and output."""
    max_cpu_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the gateway's, which drains first
    os.nice(_NICENESS)
    _limit(resource.RLIMIT_AS, _MAX_MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = _read(stdin)
    if vocabulary is None:
        return
    tokens = _vocabulary_of(vocabulary).library_tokenizer()
    _write(stdout, "")
    while (grammar := _read(stdin)) is not None:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # nobody handles its signal: it ends the process
        reason = _reason(tokens, grammar.decode())
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(stdout, reason)


if __name__ == "__main__":
    main()
