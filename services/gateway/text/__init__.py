"""Text in and out of the gateway: tokenizers, incremental detokenizing and chat templates. No torch, no network."""
