"""``orca generate``: continue a prompt, text as it comes."""

import asyncio
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import options as opt
from services.cli.calls import DEFAULT_ADDRESS, told_plainly

if TYPE_CHECKING:
    from shared.client import Delta, GenerateOptions

__all__ = ["generate"]


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Text to continue; without it, or as -, standard input is read."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", metavar="PATH", show_default=False, help="Read the prompt from a file; - is standard input."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", rich_help_panel="Sampling", help="Output tokens at most.")
    ] = 128,
    temperature: opt.TemperatureOption = 1.0,
    top_k: opt.TopKOption = 0,
    top_p: opt.TopPOption = 1.0,
    min_p: opt.MinPOption = 0.0,
    seed: opt.SeedOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    stop_token_id: opt.StopTokenIdOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each delta; the last has the usage.")
    ] = False,
    address: opt.AddressOption = DEFAULT_ADDRESS,
) -> None:
    """Continue a prompt and stream the text. Ctrl-C cancels the request.

    One line end at the end of a file or of standard input does not belong to the prompt.
    """
    from shared.client import GenerateOptions

    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    with told_plainly(address):
        asyncio.run(_stream(address, _read_prompt(prompt, file), options, as_json=as_json))


async def _stream(address: str, prompt: str, options: "GenerateOptions", *, as_json: bool) -> None:
    from shared.client import GatewayClient

    async with GatewayClient(address) as client, contextlib.aclosing(client.generate(prompt, options)) as deltas:
        async for delta in deltas:
            sys.stdout.write(json.dumps(_as_dict(delta)) + "\n" if as_json else delta.text)
            sys.stdout.flush()
    if not as_json and sys.stdout.isatty():
        sys.stdout.write("\n")


def _as_dict(delta: "Delta") -> dict[str, Any]:
    fields: dict[str, Any] = {"request_id": delta.request_id} if delta.request_id else {}
    fields |= {"text": delta.text, "token_ids": delta.token_ids}
    if (finish := delta.finish) is not None:
        fields["finish_reason"] = finish.reason.name.lower()
        fields["timing"] = {
            "queue_ms": finish.queue_ms,
            "prefill_ms": finish.prefill_ms,
            "decode_ms": finish.decode_ms,
        }
    if delta.usage is not None:
        fields["usage"] = dataclasses.asdict(delta.usage)
    return fields


def _read_prompt(prompt: str | None, file: str | None) -> str:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give either PROMPT or --file, not both")
    if prompt is not None and prompt != "-":
        return prompt
    if file is None and prompt is None and sys.stdin.isatty():
        raise typer.BadParameter('give a prompt, for example: orca generate "Once upon a time"')
    try:
        data = sys.stdin.buffer.read() if file in {None, "-"} else Path(str(file)).read_bytes()
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the prompt is not UTF-8 text (byte {error.start})") from error
