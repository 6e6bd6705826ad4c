from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from services.gateway.text.chat_template import ChatTemplate
from shared.errors import InvalidRequestError, ModelError
from shared.text.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from shared.text.tokenizer import Tokenizer

CHATML = """{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA_STYLE = """{{- bos_token }}
{%- set ns = namespace(system="") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if ns.system %}<<SYS>>{{ ns.system }}<</SYS>>{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": 'Be <brief> & "kind"'}, {"role": "user", "content": "  spaces  \n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2 🙂"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "naïve <é>", "parameters": {"b": 1, "a": []}}}]


def _reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [messages], chat_template=template, bos_token="<s>", eos_token="</s>", **options
    )
    return str(rendered[0][0])


def _ours(template: str | None, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": False} | options
    return ChatTemplate(template, bos_token="<s>", eos_token="</s>").render(messages, **options)


@pytest.fixture(params=["smollm2", "chatml", "llama"])
def template(request: pytest.FixtureRequest, smollm2: Tokenizer) -> str:
    return {"smollm2": smollm2.chat_template or "", "chatml": CHATML, "llama": LLAMA_STYLE}[request.param]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("options", [{"add_generation_prompt": True}, {}, {"tools": TOOLS}])
def test_the_text_is_that_of_transformers(
    template: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    assert _ours(template, messages, **options) == _reference(template, messages, **options)


@pytest.mark.parametrize("final", ["The answer", "trailing  ", ""])
def test_the_last_message_can_be_continued_as_in_transformers(template: str, final: str) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": final}]
    prompt = _ours(template, messages, continue_final_message=True)
    assert prompt == _reference(template, messages, continue_final_message=True)
    assert prompt.endswith(final.rstrip() if "trim" in template else final)


def test_the_default_model_end_to_end(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    template = ChatTemplate(smollm2.chat_template, bos_token=smollm2.bos_token, eos_token=smollm2.eos_token)
    prompt = template.render(messages, add_generation_prompt=True)
    expected = smollm2_reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert smollm2.encode(prompt, add_special_tokens=False) == expected


def test_content_may_be_nothing_or_text_parts() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "tool"},
    ]
    assert _ours(template, messages) == "[a\nb][][]"


def test_tool_calls_arguments_are_objects_to_the_template() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '{"name": "f", "arguments": {"x": 1}}' in _ours(CHATML, messages)
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}  # the caller's message is as it was


def test_the_date_is_injected() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", now=lambda: datetime(2024, 2, 29, tzinfo=UTC))
    assert template.render([{"role": "user", "content": ""}], add_generation_prompt=False) == "2024-02-29"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only two turns') }}", "only two turns"),
        ("{{ messages.__class__.__mro__ }}", "__class__"),
        ("{{ ''.format.__globals__['sys'] }}", "__globals__"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ nothing.attribute }}", "'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(1000000) %}x{% endfor %}", "range"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_a_template_that_cannot_render_says_why(template: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _ours(template, [{"role": "user", "content": "x"}])


def test_the_length_of_the_text_is_bounded() -> None:
    template = ChatTemplate("{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}", max_characters=1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        template.render([{"role": "user", "content": "long"}], add_generation_prompt=False)


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'a }}", "{% endif %}", "x" * (1 << 21), "{% unknown %}"])
def test_a_template_that_is_no_jinja_is_the_models_fault(template: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(template)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages is empty"),
        ([{"content": "x"}], {}, r"messages\[0\]\.role"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "reads text only"),
        ([{"role": "user", "content": ["x"]}], {}, "reads text only"),
        (
            [{"role": "user", "content": "x"}],
            {"continue_final_message": True, "add_generation_prompt": True},
            "exclude",
        ),
        ([{"role": "system", "content": "x"}], {"continue_final_message": True}, "leaves out"),
    ],
)
def test_messages_that_cannot_be_are_refused(
    messages: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=message):
        _ours(template, messages, **options)


def test_byte_models_can_chat() -> None:
    assert (
        _ours(ByteTokenizer(260).chat_template, CONVERSATIONS[0], add_generation_prompt=True) == "user: Hi\nassistant: "
    )
