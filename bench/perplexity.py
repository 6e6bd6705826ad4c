"""What a number format costs in quality: ``python -m bench.perplexity``.

The perplexity of the default model on two books, in windows of 512 tokens, with its weights as the file has them in
float32 and in each other format. Prints one JSON line for each format; ``ratio`` is to float32.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch.nn import functional

from services.worker.batch import ForwardBatch
from services.worker.loading import Place, load
from shared.config import DEFAULT_MODEL
from shared.model.store import resolve
from shared.text.tokenizer import load_tokenizer

WINDOW = 512
BLOCK_SIZE = 16
TEXTS = Path(__file__).parent / "texts"


def windows(model: str, limit: int) -> list[list[int]]:
    """Token ids of the texts, cut; at most ``limit`` windows."""
    tokenizer = load_tokenizer(resolve(model))
    cut: list[list[int]] = []
    for path in sorted(TEXTS.glob("*.txt")):
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))
        cut += [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW, WINDOW)]
    return cut[:limit]


def negative_log_likelihood(model: str, dtype: str, cut: list[list[int]]) -> list[float]:
    """Of each window, mean over its tokens, nats."""
    place = Place(model, dtype, torch.device("cpu"), stage=0, num_stages=1, tp_rank=0, tp_size=1, block_size=BLOCK_SIZE)
    loaded = load(place, lambda _done, _total: None)
    num_blocks = WINDOW // BLOCK_SIZE
    kv = loaded.allocate_kv(num_blocks, BLOCK_SIZE)
    losses = []
    for ids in cut:
        batch = ForwardBatch.from_arrays(
            token_ids=ids,
            positions=range(WINDOW),
            slot_mapping=range(WINDOW),
            query_start=[0, WINDOW],
            context_lens=[WINDOW],
            block_tables=[list(range(num_blocks))],
            sample_rows=range(WINDOW),
            device=place.device,
        )
        with torch.inference_mode():
            logits = loaded.stage.logits(loaded.stage.forward(batch, None, kv)[:-1])
            losses.append(float(functional.cross_entropy(logits, torch.tensor(ids[1:]))))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dtypes", nargs="*", default=["int8"], help="formats to compare with float32")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--windows", type=int, default=1 << 20, help="at most so many windows of 512 tokens")
    arguments = parser.parse_args()
    cut = windows(arguments.model, arguments.windows)
    reference = None
    for dtype in ["float32", *arguments.dtypes]:
        started = time.monotonic()
        losses = negative_log_likelihood(arguments.model, dtype, cut)
        mean = sum(losses) / len(losses)
        reference = reference or mean
        line = {
            "measurement": "perplexity",
            "model": arguments.model,
            "dtype": dtype,
            "tokens": len(cut) * WINDOW,
            "perplexity": round(math.exp(mean), 4),
            "ratio": round(math.exp(mean - reference), 5),
            "seconds": round(time.monotonic() - started, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
