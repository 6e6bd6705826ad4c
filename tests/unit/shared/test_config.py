from __future__ import annotations

import pytest

from shared.config import EngineConfig
from shared.errors import ConfigError


@pytest.mark.parametrize(("max_model_len", "message"), [(1, "must be at least 2"), (-1, "--max-model-len")])
def test_a_sequence_has_room_for_a_prompt_and_an_output(max_model_len: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(max_model_len=max_model_len)
    assert EngineConfig(max_model_len=2).max_model_len == 2
