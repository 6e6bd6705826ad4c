"""Deltas as lines of JSON: the field names of ``shared.generation.Delta``, what is empty left out."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.generation import Delta, Finish, TokenLogprob, TopLogprob

__all__ = ["delta_line"]


def delta_line(delta: "Delta") -> str:
    """One JSON object, without a line end. ``choice``, ``text`` and ``token_ids`` are always there."""
    fields: dict[str, Any] = {"choice": delta.choice, "text": delta.text, "token_ids": delta.token_ids}
    if delta.request_id:
        fields["request_id"] = delta.request_id
    if delta.is_prompt:
        fields["is_prompt"] = True
    if delta.logprobs:
        fields["logprobs"] = [_logprob(one) for one in delta.logprobs]
    if delta.tool_calls:
        fields["tool_calls"] = [dataclasses.asdict(call) for call in delta.tool_calls]
    if delta.finish is not None:
        fields["finish"] = _finish(delta.finish)
    if delta.usage is not None:
        fields["usage"] = dataclasses.asdict(delta.usage)
    return json.dumps(fields)


def _logprob(one: "TokenLogprob | TopLogprob") -> dict[str, Any]:
    fields: dict[str, Any] = {
        "token_id": one.token_id,
        "token": one.token,
        "token_bytes": list(one.token_bytes),
        "logprob": one.logprob,
    }
    if top := getattr(one, "top", ()):
        fields["top"] = [_logprob(other) for other in top]
    return fields


def _finish(finish: "Finish") -> dict[str, Any]:
    return dataclasses.asdict(finish) | {"reason": finish.reason.name.lower()}
