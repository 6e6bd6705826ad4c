"""Text to token ids and back: the tokenizer that goes with a model."""
