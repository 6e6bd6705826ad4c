"""Text in and out of the gateway: incremental detokenizing, stop strings and chat templates. No torch, no network."""
