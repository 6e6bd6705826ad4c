from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.prompts import encode_conversation
from shared.errors import InvalidRequestError, ModelError
from shared.generation import ChatMessage, ToolCall
from shared.text.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text() for path in FOLDER.glob("*.jinja")}
KNOW_TOOLS = {"hermes", "llama3", "mistral"}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'naïve <é> & "quoted"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
CALL = ToolCall(id="call_0123", name="weather", arguments='{"city": "Saint-Étienne <3>", "days": [1, 2.5, null]}')
ASKED = ChatMessage("user", "How is it in Saint-Étienne?")
CALLED = ChatMessage("assistant", tool_calls=(CALL,))
TOLD = ChatMessage("tool", '{"sky": "blue"}', tool_call_id=CALL.id, name="weather")
CONVERSATIONS: dict[str, list[ChatMessage]] = {
    "one": [ChatMessage("user", "Hi")],
    "system": [ChatMessage("system", 'Be <brief> & "kind"'), ChatMessage("user", "  spaces  \n")],
    "turns": [
        ChatMessage("user", "1+1?"),
        ChatMessage("assistant", "2 🙂"),
        ChatMessage("user", "{{ 7 * 7 }} {% raw %}"),
    ],
    "odd roles": [ChatMessage("developer", "d"), ChatMessage("banana", "b")],
    "two users": [ChatMessage("user", "a"), ChatMessage("user", "b")],
    "called": [ASKED, CALLED, TOLD],
    "called with text": [
        ASKED,
        ChatMessage("assistant", "Let me see.", (CALL,)),
        TOLD,
        ChatMessage("assistant", "Sun"),
    ],
    "called twice": [ASKED, ChatMessage("assistant", tool_calls=(CALL, CALL)), TOLD, TOLD, ChatMessage("user", "Ok")],
    "unreadable call": [
        ASKED,
        ChatMessage("assistant", tool_calls=(ToolCall("call_0123", "weather", '{"a": '),)),
        TOLD,
    ],
}


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as people write it for transformers."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    for call in message.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = call.arguments
        function = {"name": call.name, "arguments": arguments}
        plain.setdefault("tool_calls", []).append({"id": call.id, "type": "function", "function": function})
    plain |= {"tool_call_id": message.tool_call_id} if message.tool_call_id else {}
    return plain | ({"name": message.name} if message.name else {})


def _reference(template: str, messages: Sequence[ChatMessage], **options: Any) -> str:
    """What transformers makes of it, or the reason why it does not."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"add_generation_prompt": not options.get("continue_final_message")} | options
    try:
        rendered: Any = render_jinja_template(
            [[_plain(message) for message in messages]],
            chat_template=template,
            bos_token="<s>",
            eos_token="</s>",
            **options,
        )
    except TemplateError as error:
        return f"refused: {error}"
    return str(rendered[0][0])


def _ours(template: str, messages: Sequence[ChatMessage], **options: Any) -> str:
    return ChatTemplate(template, bos_token="<s>", eos_token="</s>").render(messages, **options)


@pytest.fixture(params=[*sorted(TEMPLATES), "smollm2"])
def template(request: pytest.FixtureRequest) -> str:
    if request.param != "smollm2":
        return TEMPLATES[request.param]
    smollm2: Tokenizer = request.getfixturevalue("smollm2")
    return smollm2.chat_templates["default"]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_text_is_that_of_transformers(template: str, conversation: str, tools: list[dict[str, Any]] | None) -> None:
    messages = CONVERSATIONS[conversation]
    expected = _reference(template, messages, tools=tools)
    if expected.startswith("refused: "):
        with pytest.raises(InvalidRequestError) as refusal:
            _ours(template, messages, tools=tools or ())
        assert str(refusal.value).endswith(expected.removeprefix("refused: "))
    else:
        assert _ours(template, messages, tools=tools or ()) == expected


@pytest.mark.parametrize("final", ["The answer", "trailing  ", "\n two\n", "", "The"])
def test_the_last_message_can_be_continued_as_in_transformers(template: str, final: str) -> None:
    messages = [ChatMessage("user", "The question"), ChatMessage("assistant", final)]
    prompt = _ours(template, messages, continue_final_message=True)
    assert prompt == _reference(template, messages, continue_final_message=True)
    assert prompt.rstrip().endswith(final.strip())


def test_templates_tell_whether_they_know_tools() -> None:
    assert {name for name, text in TEMPLATES.items() if ChatTemplate(text).knows_tools} == KNOW_TOOLS
    assert not ChatTemplate("{# tools #}{{ messages[0].tools }}").knows_tools


def test_the_default_model_end_to_end(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    template = ChatTemplate(smollm2.chat_templates["default"], bos_token=smollm2.bos_token, eos_token=smollm2.eos_token)
    prompt = template.render([ChatMessage("user", "What is the capital of France?")])
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    expected = smollm2_reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encode_conversation(smollm2, prompt) == expected


def test_a_message_has_what_it_has_and_no_more() -> None:
    template = "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    assert _ours(template, [ASKED]) == "['role', 'content']"
    assert _ours(template, [TOLD]) == "['role', 'content', 'tool_call_id', 'name']"


def test_a_call_without_arguments_has_an_empty_object() -> None:
    call = ToolCall("call_0123", "time", "")
    assert (
        _ours(TEMPLATES["hermes"], [ASKED, ChatMessage("assistant", tool_calls=(call,))]).count('"arguments": {}') == 1
    )


def test_the_date_is_injected() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", now=lambda: datetime(2024, 2, 29, tzinfo=UTC))
    assert template.render([ASKED]) == "2024-02-29"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only two turns') }}", "only two turns"),
        ("{{ messages.__class__.__mro__ }}", "__class__"),
        ("{{ ''.format.__globals__['sys'] }}", "__globals__"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ nothing.attribute }}", "'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10**9) %}x{% endfor %}", "range"),
        ("{{ 'x' * 10**9 }}", "repeated"),
        ("{{ 10**9 * [1] }}", "repeated"),
        ("{{ 9**(9**9) }}", "exponent"),
        ("{{ lipsum(100000) }}", "'lipsum' is undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_a_template_that_cannot_render_says_why(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot render these messages: .*{message}"):
        _ours(template, [ASKED])


@pytest.mark.parametrize(
    "template",
    [
        "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    ],
)
def test_an_endless_template_ends(template: str) -> None:
    compiled = ChatTemplate(template, max_cpu_s=0.05)
    started = time.thread_time()
    with pytest.raises(InvalidRequestError, match="takes too long"):
        compiled.render([ASKED])
    assert time.thread_time() - started < 5


def test_the_length_of_the_text_is_bounded() -> None:
    template = ChatTemplate("{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}", max_characters=1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        template.render([ASKED])


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'a }}", "{% endif %}", "x" * (1 << 21), "{% unknown %}"])
def test_a_template_that_is_no_jinja_is_the_models_fault(template: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([ASKED], "last message is of role 'user'"),
        ([ChatMessage("assistant", "unseen")], "leaves out"),
    ],
)
def test_messages_that_cannot_be_continued_are_refused(messages: list[ChatMessage], message: str) -> None:
    template = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=message):
        _ours(template, messages, continue_final_message=True)


def test_byte_models_can_chat() -> None:
    template = ByteTokenizer(260).chat_templates["default"]
    assert _ours(template, CONVERSATIONS["one"]) == "user: Hi\nassistant: "
