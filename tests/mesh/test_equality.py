"""Greedy output of the whole mesh equals transformers' ``generate`` token for token, at every topology.

Twenty prompts and more of 1 to 600 tokens run together, so that prefills and decodes of very different lengths share
iterations; then some of them run alone. Where a token differs, the reference's own two best logits must be a near-tie.
"""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import tokenizers
import torch
import tqdm  # type: ignore[import-untyped]
import transformers

from shared.client import GatewayClient, GenerateOptions
from shared.config import EngineConfig, SchedulingConfig
from shared.model.config import load
from shared.model.source import GgufFile
from shared.model.store import resolve
from shared.topology import Topology, split_layers
from tests.factories import ORCA
from tests.mesh.kept_workers import KeptWorkers
from tests.mesh.reference import Reference, assert_same_or_near_tie

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    Cases = Callable[[str], "Case"]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 128, 129, 200, 256, 300, 512, 600)
LONG = (256, 300, 512)
"""Left out for the default model, whose reference takes its time."""
NUM_TOKENS = 12
SMOLLM2 = "smollm2-135m-instruct"
TOPOLOGIES = [Topology(1, 1), Topology(2, 1), Topology(1, 2), Topology(2, 2), Topology(3, 1)]


@dataclass(frozen=True)
class Case:
    """A model, its prompts and what the reference makes of them."""

    model: str
    reference: Reference
    prompts: list[list[int]]
    expected: list[list[int]]

    def up_to(self, length: int) -> Case:
        """The same without longer prompts, which come last."""
        num = sum(len(prompt) <= length for prompt in self.prompts)
        return replace(self, prompts=self.prompts[:num], expected=self.expected[:num])


def make_case(model: str, reference: Reference, vocab_size: int, lengths: Iterable[int] = PROMPT_LENGTHS) -> Case:
    rng = random.Random(7)
    prompts = [[rng.randrange(10, vocab_size) for _ in range(length)] for length in lengths]
    return Case(model, reference, prompts, [reference.generate(prompt, NUM_TOKENS) for prompt in prompts])


def tiny_llama(*, tied: bool, num_layers: int) -> Any:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=300,
            hidden_size=96,
            intermediate_size=160,
            num_hidden_layers=num_layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.2,
            tie_word_embeddings=tied,
        )
    )


def tiny_gpt2() -> Any:
    torch.manual_seed(2)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=4, n_head=4, n_positions=1024, initializer_range=0.2)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama-tied": lambda: tiny_llama(tied=True, num_layers=7),
    "llama-untied": lambda: tiny_llama(tied=False, num_layers=5),
    "gpt2": tiny_gpt2,
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A folder's tokenizer: these tests speak in token ids, but a gateway wants one."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    vocab |= {f"{alphabet[0]}{index}": index for index in range(len(vocab), vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def make_tiny(name: str, folder: Path) -> Case:
    model = MODELS[name]()
    model.train(mode=False)
    model.save_pretrained(folder)
    write_tokenizer(folder, vocab_size=300)
    return make_case(str(folder), Reference(model), vocab_size=300)


def make_smollm2() -> Case:
    source = resolve(SMOLLM2)
    assert isinstance(source, GgufFile)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    )
    model.train(mode=False)
    lengths = [length for length in PROMPT_LENGTHS if length not in LONG]
    return make_case(SMOLLM2, Reference(model), vocab_size=49152, lengths=lengths)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """What the reference makes of each model, computed once."""
    tqdm.tqdm.monitor_interval = 0  # with which the reference's progress bars would start a thread that stays

    @functools.cache
    def case_of(name: str) -> Case:
        return make_smollm2() if name == SMOLLM2 else make_tiny(name, tmp_path_factory.mktemp(name))

    return case_of


def ids(value: object) -> str | None:
    return f"{value.num_stages}x{value.tp_size}" if isinstance(value, Topology) else None


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[KeptWorkers]:
    """Those of a topology, which tests choose as a parameter; all of its tests come one after the other."""
    async with KeptWorkers(request.param) as kept:
        yield kept


def at(*topologies: Topology) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("workers", topologies, ids=ids, indirect=True)


PLAIN = replace(ORCA, max_batch_size=32)
BEYOND = SchedulingConfig(max_batch_size=32, max_batch_tokens=64)
ALL_SLOTS, FEW_SLOTS = 8192, 640
"""K/V for all prompts together; and for little more than the longest, so that paged K/V may have to preempt."""


async def check(
    case: Case, workers: KeptWorkers, scheduling: SchedulingConfig, *, num_slots: int, alone: int, block_size: int = 16
) -> None:
    """Blocks of 16 tokens are what our own operations take on CPUs; with smaller ones they are torch's."""
    topology = workers.topology
    config = load(resolve(case.model))
    num_layers = len(split_layers(config.num_layers, topology.num_stages)[0])
    num_heads = -(-config.num_kv_heads // topology.tp_size)
    engine = EngineConfig(
        model=case.model,
        topology=topology,
        dtype="float32",
        scheduling=scheduling,
        kv_memory_bytes=num_slots * 2 * num_layers * num_heads * config.head_dim * 4,
        block_size=block_size,
    )
    async with workers.mesh(engine) as mesh, GatewayClient(mesh.gateway_address) as client:

        async def run(prompt: list[int]) -> list[int]:
            options = GenerateOptions(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            return [token async for delta in client.generate(prompt, options) for token in delta.token_ids]

        together = await asyncio.gather(*map(run, case.prompts))
        for prompt, expected, actual in zip(case.prompts, case.expected, together, strict=True):
            assert_same_or_near_tie(case.reference, prompt, expected, actual)
        for index in range(0, len(case.prompts), len(case.prompts) // alone):
            for _ in range(1 + scheduling.prefix_cache):
                actual = await run(case.prompts[index])
                assert_same_or_near_tie(case.reference, case.prompts[index], case.expected[index], actual)
        status = (await client.status()).engine
        assert status.num_running == status.num_waiting == status.num_used_slots == status.num_broken_invariants == 0
        if scheduling.prefix_cache:
            assert status.num_cached_prompt_tokens > 0


@at(*TOPOLOGIES)
@pytest.mark.parametrize("model", MODELS)
async def test_tiny_models_as_orca_has_it(cases: Cases, workers: KeptWorkers, model: str) -> None:
    await check(cases(model), workers, PLAIN, num_slots=ALL_SLOTS, alone=3)


@at(*TOPOLOGIES)
@pytest.mark.parametrize("model", MODELS)
async def test_tiny_models_with_all_that_goes_beyond(cases: Cases, workers: KeptWorkers, model: str) -> None:
    await check(cases(model), workers, BEYOND, num_slots=FEW_SLOTS, alone=3, block_size=2)


@at(Topology(2, 2))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("max_batch_size", [1, 5])
async def test_several_batch_sizes(cases: Cases, workers: KeptWorkers, model: str, max_batch_size: int) -> None:
    scheduling = replace(PLAIN, max_batch_size=max_batch_size)
    await check(cases(model), workers, scheduling, num_slots=ALL_SLOTS, alone=1)


SINGLE_SWITCHES: dict[str, dict[str, Any]] = {
    "paged": {"kv_policy": "paged"},
    "chunked": {"chunked_prefill": True, "max_batch_tokens": 64},
    "cached": {"prefix_cache": True},
    "ahead": {"run_ahead": 2},
    "split": {"split_over_stages": True},
    "request-level": {"batching": "request"},
}


@at(Topology(1, 1), Topology(2, 2))
@pytest.mark.parametrize("switch", SINGLE_SWITCHES)
async def test_each_switch_by_itself(cases: Cases, workers: KeptWorkers, switch: str) -> None:
    case = cases("llama-untied")
    if switch == "request-level":  # reads what is longer than the shortest prompt token by token
        case = case.up_to(129)
    num_slots = FEW_SLOTS if switch == "paged" else ALL_SLOTS
    scheduling = replace(PLAIN, **SINGLE_SWITCHES[switch])
    await check(case, workers, scheduling, num_slots=num_slots, alone=2)


@at(Topology(1, 2), Topology(3, 1))
@pytest.mark.parametrize("switch", ["kv_policy", "chunked_prefill", "prefix_cache", "run_ahead", "split_over_stages"])
async def test_all_but_one(cases: Cases, workers: KeptWorkers, switch: str) -> None:
    scheduling = replace(BEYOND, **{switch: getattr(PLAIN, switch)})
    await check(cases("llama-untied"), workers, scheduling, num_slots=FEW_SLOTS, alone=2, block_size=2)


@at(Topology(2, 1))
async def test_smollm2_as_orca_has_it(cases: Cases, workers: KeptWorkers) -> None:
    await check(cases(SMOLLM2), workers, PLAIN, num_slots=ALL_SLOTS, alone=2)


@at(*TOPOLOGIES)
async def test_smollm2_with_all_that_goes_beyond(cases: Cases, workers: KeptWorkers) -> None:
    await check(cases(SMOLLM2), workers, BEYOND, num_slots=FEW_SLOTS, alone=3)
