from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from services.gateway.served_model import load_model_text
from shared.errors import InvalidRequestError, ModelError
from shared.generation import ChatMessage
from shared.text.spelling import BYTE_LEVEL_CHARACTERS

if TYPE_CHECKING:
    from pathlib import Path


def _model(folder: Path, chat_template: object) -> str:
    backend = Backend(models.BPE({token: index for index, token in enumerate(BYTE_LEVEL_CHARACTERS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


@pytest.mark.parametrize(
    ("chat_template", "reason"), [(None, "came without one"), ("{% for %}", "line 1 of the chat template is no valid")]
)
def test_a_model_without_a_good_template_serves_prompts_and_says_why_not_conversations(
    tmp_path: Path, chat_template: str | None, reason: str
) -> None:
    with capture_logs() as logs:
        text = load_model_text(_model(tmp_path, chat_template))
    assert text.tokenizer.encode("hi")
    assert not text.has_chat_template
    (warning,) = [entry for entry in logs if entry["event"] == "no_chat_template"]
    assert warning["log_level"] == "warning"
    assert reason in warning["reason"]
    with pytest.raises(InvalidRequestError, match=f"no chat template .*{reason}.*send a plain prompt"):
        text.chat_template(with_tools=False)


def test_templates_have_names(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "{{ tools | length }}T"}]
    with capture_logs() as logs:
        text = load_model_text(_model(tmp_path, named))
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    messages = [ChatMessage("user", "hi")]
    assert text.chat_template(with_tools=False).render(messages) == "D"
    assert text.chat_template(with_tools=True).render(messages, tools=[{}, {}]) == "2T"


def test_a_broken_template_of_several_spoils_no_other(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "{{"}]
    with capture_logs() as logs:
        text = load_model_text(_model(tmp_path, named))
    assert [entry["name"] for entry in logs if entry["event"] == "chat_template_is_broken"] == ["tool_use"]
    assert text.chat_template(with_tools=True) is text.chat_template(with_tools=False)


def test_a_model_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="this gateway's host lacks what the engine's model"):
        load_model_text(str(tmp_path / "nothing"))
