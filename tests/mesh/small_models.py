"""Small models with a tokenizer and a chat template, made in a moment: their answers are noise, their shapes real."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CHAT_TEMPLATE", "write_chat_model"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "i n", "Ġ the", "e r", "o n", "a n")

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with tools as Hermes and Qwen have them."""


def write_chat_model(folder: Path) -> Path:
    """Write a Llama of a few thousand weights with a byte-level vocabulary; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[(left, right) for left, right in (merge.split() for merge in MERGES)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_turn = tokenizer.token_to_id("<|im_end|>")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(pieces) + len(SPECIAL_TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.4,  # so that the model has opinions
        bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=end_of_turn,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
