"""Which part of each weight a tensor-parallel rank holds (Megatron-LM, Shoeybi et al. 2019).

The rules:

- Query heads are split evenly, so the number of ranks must divide the number of heads.
- Key-value heads are split evenly, or, when there are fewer than ranks, each is held by ``size / num_kv_heads`` ranks.
- The inner size of the MLP is split at ``intermediate_size * rank // size``; parts may differ by one.
- The vocabulary is split into parts of ``ceil(vocab_size / size)``; the last ones are shorter and padded with zeros.

Knows numbers only, no tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.model.config import ModelConfig

__all__ = [
    "check_divisible",
    "heads_of_rank",
    "intermediate_of_rank",
    "kv_heads_of_rank",
    "padded_vocab_part",
    "vocab_of_rank",
]


def check_divisible(config: ModelConfig, size: int) -> None:
    """Raise ConfigError, naming the sizes that work, when ``size`` ranks cannot share the model's heads."""
    if not _divides(config, size):
        valid = [str(n) for n in range(1, config.num_heads + 1) if _divides(config, n)]
        raise ConfigError(
            f"{size} tensor-parallel ranks cannot share {config.num_heads} attention heads with {config.num_kv_heads} "
            f"key-value heads. Sizes that work for {config.architecture}: {', '.join(valid)}."
        )


def _divides(config: ModelConfig, size: int) -> bool:
    return (
        size >= 1
        and config.num_heads % size == 0
        and (config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0)
    )


def heads_of_rank(config: ModelConfig, rank: int, size: int) -> range:
    """Return the query heads of ``rank``."""
    check_divisible(config, size)
    per_rank = config.num_heads // size
    return range(rank * per_rank, (rank + 1) * per_rank)


def kv_heads_of_rank(config: ModelConfig, rank: int, size: int) -> range:
    """Return the key-value heads that the query heads of ``rank`` attend with."""
    heads = heads_of_rank(config, rank, size)
    per_kv_head = config.num_heads // config.num_kv_heads
    return range(heads.start // per_kv_head, (heads.stop - 1) // per_kv_head + 1)


def intermediate_of_rank(config: ModelConfig, rank: int, size: int) -> range:
    """Return the inner units of the MLP that ``rank`` computes."""
    return range(config.intermediate_size * rank // size, config.intermediate_size * (rank + 1) // size)


def vocab_of_rank(config: ModelConfig, rank: int, size: int) -> range:
    """Return the token ids whose embedding and logit ``rank`` holds; see :func:`padded_vocab_part`."""
    width = padded_vocab_part(config, size)
    return range(min(rank * width, config.vocab_size), min((rank + 1) * width, config.vocab_size))


def padded_vocab_part(config: ModelConfig, size: int) -> int:
    """Return the rows of each rank's part of the vocabulary, padding included."""
    return -(-config.vocab_size // size)
