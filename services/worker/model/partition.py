"""Which part of each weight a tensor-parallel rank holds (Megatron-LM, Shoeybi et al. 2019).

The rules:

- Key-value heads are split into parts that differ by one at most, and each takes its query heads along: 2 ranks share
  3 key-value heads with 9 query heads as 1 with 3 and 2 with 6.
- Where there are fewer key-value heads than ranks, each is held by ``size / num_kv_heads`` ranks, which split its query
  heads; that quotient must be whole.
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
    if 1 <= size <= config.num_kv_heads:
        return True
    return config.num_kv_heads < size <= config.num_heads and size % config.num_kv_heads == 0


def kv_heads_of_rank(config: ModelConfig, rank: int, size: int) -> range:
    """Return the key-value heads that the query heads of ``rank`` attend with."""
    check_divisible(config, size)
    if size <= config.num_kv_heads:
        return _part(config.num_kv_heads, rank, size)
    kv_head = rank // (size // config.num_kv_heads)
    return range(kv_head, kv_head + 1)


def heads_of_rank(config: ModelConfig, rank: int, size: int) -> range:
    """Return the query heads of ``rank``: all of its key-value heads', or its share of one key-value head's."""
    kv_heads = kv_heads_of_rank(config, rank, size)
    per_kv_head = config.num_heads // config.num_kv_heads
    if size <= config.num_kv_heads:
        return range(kv_heads.start * per_kv_head, kv_heads.stop * per_kv_head)
    num_holders = size // config.num_kv_heads
    share = _part(per_kv_head, rank % num_holders, num_holders)
    first = kv_heads.start * per_kv_head
    return range(first + share.start, first + share.stop)


def _part(total: int, rank: int, size: int) -> range:
    """The part of ``rank`` when ``total`` is split into parts that differ by one at most."""
    return range(total * rank // size, total * (rank + 1) // size)


def intermediate_of_rank(config: ModelConfig, rank: int, size: int) -> range:
    """Return the inner units of the MLP that ``rank`` computes."""
    return _part(config.intermediate_size, rank, size)


def vocab_of_rank(config: ModelConfig, rank: int, size: int) -> range:
    """Return the token ids whose embedding and logit ``rank`` holds; see :func:`padded_vocab_part`."""
    width = padded_vocab_part(config, size)
    return range(min(rank * width, config.vocab_size), min((rank + 1) * width, config.vocab_size))


def padded_vocab_part(config: ModelConfig, size: int) -> int:
    """Return the rows of each rank's part of the vocabulary, padding included."""
    return -(-config.vocab_size // size)
