"""Cases of the field: missing templates, odd roles and content, begin tokens (scenarios 26 and 27)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from services.gateway.served_model import ModelText
from services.gateway.text.chat_template import ChatTemplate
from shared.client import ChatMessage, ChatRequest, GenerateOptions, GenerateRequest
from shared.errors import InvalidRequestError
from shared.generation import ToolCall
from shared.text.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_scheduler import ENGINE, FakeScheduler
from tests.fakes.forced_tokens import forced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.service.gateway.conftest import RunningGateway, StartGateway

BOS, EOS = 257, 256
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if message.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('Unknown role: ' + message.role) }}"
    "{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}"
    "{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% for call in message.tool_calls or [] %}<{{ call.function.name }}>"
    "{% endfor %}{% endfor %}"
)


def _load(template: str | None) -> Callable[[str], ModelText]:
    tokenizer = ByteTokenizer(300)
    templates = {} if template is None else {"default": ChatTemplate(template, bos_token=tokenizer.bos_token)}
    return lambda _: ModelText(tokenizer, templates)


def _scheduler() -> FakeScheduler:
    return FakeScheduler(engine=dataclasses.replace(ENGINE, max_model_len=500, num_slots=500))


async def _prompt(gateway: RunningGateway, request: ChatRequest | GenerateRequest) -> list[int]:
    """The ids that reach the scheduler; the usage has as many."""
    async with forced(gateway.session, lambda _: [EOS]) as submits:
        call = gateway.client.chat if isinstance(request, ChatRequest) else gateway.client.generate
        *_, last = [delta async for delta in call(request)]  # type: ignore[arg-type]
    assert last.usage is not None
    ids = submits[0].prompt_token_ids.tolist()
    assert last.usage.num_prompt_tokens == len(ids)
    return ids


def _conversation(*turns: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role, content) for role, content in turns]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (_conversation(("system", "s"), ("user", "u")), "System role not supported"),
        (_conversation(("user", "a"), ("user", "b")), "Roles must alternate"),
        (_conversation(("developer", "d")), "System role not supported"),
        (_conversation(("banana", "b")), "messages\\[0\\].role is 'banana'"),
    ],
)
async def test_what_a_template_refuses_is_the_clients_fault(
    start_gateway: StartGateway, messages: Sequence[ChatMessage], message: str
) -> None:
    async with start_gateway(scheduler=_scheduler(), load=_load(STRICT)) as gateway:
        await gateway.health(serving=True)
        with pytest.raises(InvalidRequestError, match=message):
            [delta async for delta in gateway.client.chat(ChatRequest(messages))]
        again = await _prompt(gateway, ChatRequest(_conversation(("user", "a"))))
    assert bytes(again[1:]) == b"[user]a"


async def test_a_call_without_content_and_its_result_are_turns_like_others(start_gateway: StartGateway) -> None:
    called = ChatMessage("assistant", tool_calls=(ToolCall("call_1", "now", "{}"),))
    messages = [ChatMessage("user", "when?"), called, ChatMessage("tool", "12:00", tool_call_id="call_1")]
    template = STRICT.replace("loop.index0 % 2 == 0", "loop.index0 == 0")
    async with start_gateway(scheduler=_scheduler(), load=_load(template)) as gateway:
        await gateway.health(serving=True)
        ids = await _prompt(gateway, ChatRequest(messages))
    assert bytes(ids[1:]) == b"[user]when?[assistant]<now>[tool]12:00"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__.__mro__ }}", "__class__"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{{ '' }}{% endfor %}{% endfor %}" * 9,
            "takes too long",
        ),
    ],
)
async def test_a_hostile_template_ends_its_own_request(
    start_gateway: StartGateway, template: str, message: str
) -> None:
    async with start_gateway(scheduler=_scheduler(), load=_load(template)) as gateway:
        await gateway.health(serving=True)
        with pytest.raises(InvalidRequestError, match=message):
            [delta async for delta in gateway.client.chat(ChatRequest(_conversation(("user", "a"))))]
        assert await _prompt(gateway, GenerateRequest(["a"], GenerateOptions(max_tokens=1)))


async def test_without_a_template_conversations_are_refused_and_prompts_are_not(start_gateway: StartGateway) -> None:
    async with start_gateway(scheduler=_scheduler(), load=_load(None)) as gateway:
        await gateway.health(serving=True)
        with pytest.raises(InvalidRequestError, match=r"no chat template .*send a plain prompt"):
            [delta async for delta in gateway.client.chat(ChatRequest(_conversation(("user", "a"))))]
        assert not (await gateway.client.model_info()).has_chat_template
        assert await _prompt(gateway, GenerateRequest(["a"])) == [BOS, *b"a"]


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
async def test_there_is_one_begin_token_whoever_spells_it(start_gateway: StartGateway, template: str) -> None:
    async with start_gateway(scheduler=_scheduler(), load=_load(template)) as gateway:
        await gateway.health(serving=True)
        assert await _prompt(gateway, ChatRequest(_conversation(("user", "hi")))) == [BOS, *b"hi"]
        for text in ("hi", "<|bos|>hi"):
            ids = await _prompt(gateway, GenerateRequest([text]))
            assert ids == [BOS, *b"hi"] == list(await gateway.client.tokenize(text))
        for given in ([*b"hi"], [BOS, *b"hi"], [BOS, BOS, *b"hi"]):
            assert await _prompt(gateway, GenerateRequest([given])) == given
