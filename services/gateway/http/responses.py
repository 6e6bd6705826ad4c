"""The shapes of all responses, as they stand in the OpenAPI document.

Completions are written by `completion_answer` and `chat_answer` without these models, for speed; tests hold the two
against each other.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "Completion",
    "DetokenizeAnswer",
    "ErrorAnswer",
    "Health",
    "ModelCard",
    "ModelList",
    "TokenizeAnswer",
    "Version",
]

FinishReasonName = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    """A response, or a part of one."""

    # Most of them are only written down: they are built when the OpenAPI document is asked for.
    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)


class ErrorBody(Shape):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request, where it is one."""
    code: str | None


class ErrorAnswer(Shape):
    """A failure. In a stream, it is one event, the last."""

    error: ErrorBody


class PromptTokensDetails(Shape):
    """Where prompt tokens came from."""

    cached_tokens: int
    """Found in the prefix cache."""


class UsageBody(Shape):
    """Tokens of a request."""

    prompt_tokens: int
    """Of all prompts, each counted once."""
    completion_tokens: int
    """Of all choices; a token that stopped one counts."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobsBody(Shape):
    """Parallel lists, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    """One output of a prompt, or news of it."""

    index: int
    """Prompt times n plus sample."""
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: FinishReasonName | None
    stop_reason: str | int | None
    """What stopped it: the stop string, or the id of the token."""
    token_ids: list[int] | None = None
    """With ``return_token_ids``."""
    prompt_token_ids: list[int] | None = None
    """Likewise; of a stream, in the choice's first chunk."""


class AnswerHead(Shape):
    """What all answers and chunks have."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Completion(AnswerHead):
    """Of ``/v1/completions``; a chunk of a stream has the same shape, the usage in the last one only."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class TopLogprobBody(Shape):
    """A token and how likely it was."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprobBody(TopLogprobBody):
    """A token of the output, and the most likely ones in its place."""

    top_logprobs: list[TopLogprobBody]


class ChatLogprobsBody(Shape):
    """One entry for each token."""

    content: list[TokenLogprobBody]
    refusal: None


class FunctionCall(Shape):
    """What is called, with what."""

    name: str
    arguments: str


class ToolCallAnswer(Shape):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class MessageAnswer(Shape):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(Shape):
    """One answer."""

    index: int
    message: MessageAnswer
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReasonName
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(AnswerHead):
    """Of ``/v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | None = None
    """With ``return_token_ids``."""


class FunctionCallNews(Shape):
    """More of a call."""

    name: str | None = None
    arguments: str


class ToolCallNews(Shape):
    """More of a call; id, type and name come with its first piece."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallNews


class MessageNews(Shape):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallNews] | None = None


class ChatChunkChoice(Shape):
    """News of one answer."""

    index: int
    delta: MessageNews
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReasonName | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(AnswerHead):
    """An event of a stream of ``/v1/chat/completions``."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | None = None
    """With ``return_token_ids``, in the first chunk."""


class ModelCard(Shape):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When this gateway started, Unix time in seconds."""
    owned_by: str = "orca-mesh"
    max_model_len: int
    """Longest sequence, prompt and output, in tokens."""
    vocab_size: int
    """Token ids are below it."""


class ModelList(Shape):
    """All models, of which there is one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(Shape):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Shape):
    """The text of token ids."""

    prompt: str


class Health(Shape):
    """Whether the gateway lives, or can serve."""

    status: Literal["ok", "not ready"]
    reason: str | None = None
    """What is missing."""


class Version(Shape):
    """What runs here."""

    version: str
