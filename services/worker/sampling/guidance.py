"""Output that must match a grammar: which tokens may come next, by the library llguidance.

The gateway has checked the grammar already; here nothing that goes wrong with one costs more than its own sequence,
whose tokens are then all barred. Tokenizer and grammars are read in a thread of their own, from the moment that a plan
names them on; the first token waits for it. After that a token takes the library some microseconds.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.sampling.logit_rules import BARRED
from shared.log import get_logger
from shared.text.guidance_vocabulary import GuidanceVocabulary, guidance_matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

    from shared.text.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "Guided", "Vocabulary"]


class Vocabulary:
    """A model's tokens as the library takes them; loaded by whoever needs it first, kept as long as the weights."""

    def __init__(self, load: Callable[[], Tokenizer], size: int) -> None:
        self._load = load
        self._size = size
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None

    def tokens(self) -> LLTokenizer:
        """Return them (0.4 s for 50,000, the first time). Raises ``ModelError``."""
        with self._lock:
            if self._tokens is None:
                tokenizer = self._load()
                vocabulary = GuidanceVocabulary.of(tokenizer, self._size)
                self._tokens = vocabulary.library_tokenizer(encode=tokenizer.encode)
            return self._tokens


class GrammarCompiler:
    """Reads grammars one after the other, in a daemon thread that starts with the first of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._jobs: queue.SimpleQueue[tuple[Future[LLMatcher], str, Sequence[int]] | None] = queue.SimpleQueue()
        self._is_running = False

    def compile(self, grammar: str, output: Sequence[int]) -> Future[LLMatcher]:
        """Return what will be the state of ``grammar`` after the tokens of ``output``."""
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
        matcher: Future[LLMatcher] = Future()
        self._jobs.put((matcher, grammar, output))
        return matcher

    def close(self) -> None:
        """Let the thread end after what it has been given."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, grammar, output = job
            try:
                matcher = guidance_matcher(self._vocabulary.tokens(), grammar)
                matcher.consume_tokens(list(output))
            except BaseException as error:  # noqa: BLE001 - for the sequence that asked; a panic of the library, too
                future.set_exception(error)
            else:
                future.set_result(matcher)
            del job, future


class Guided:
    """A ``LogitRule``: bars all tokens that the grammar does not allow next, and all of them once it has failed."""

    def __init__(self, matcher: Future[LLMatcher]) -> None:
        self._matcher = matcher

    def apply(self, logits: Tensor) -> None:
        """Bar them; the first time, wait until the grammar has been read."""
        try:
            matcher = self._matcher.result()
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            failure: str = matcher.stop_reason() if matcher.is_error() else ""
        except BaseException as error:  # noqa: BLE001 - a panic of the library, too, is this sequence's alone
            failure = type(error).__name__
        if failure:
            # Not in the library's own words: they may quote the grammar and the text.
            get_logger().warning("grammar_failed", reason=failure)
            logits.fill_(BARRED)
            return
        barred = torch.from_numpy(np.unpackbits(bits, count=len(logits), bitorder="little") == 0)
        logits.masked_fill_(barred.to(logits.device), BARRED)

    def note(self, token_id: int) -> None:
        """Go on in the grammar; if the token does not fit it, the next one shows that."""
        if self._matcher.exception() is None:
            self._matcher.result().consume_token(token_id)
