"""``orca chat``: a conversation on the terminal, through the model's own chat template."""

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options as opt
from services.cli.calls import DEFAULT_ADDRESS, told_plainly
from shared.errors import InvalidRequestError, OrcaError

if TYPE_CHECKING:
    from shared.client import ChatMessage, GatewayClient, GenerateOptions

__all__ = ["chat"]

_HELP = """/help   this text
/reset  forget the conversation
/quit   leave, as Ctrl-D does
Ctrl-C stops the current answer."""


def chat(
    system: Annotated[
        str | None, typer.Option("--system", "-s", show_default=False, help="Instruction that stands before all turns.")
    ] = None,
    max_tokens: opt.MaxTokensOption = None,
    temperature: opt.TemperatureOption = 0.7,
    top_k: opt.TopKOption = 0,
    top_p: opt.TopPOption = 0.95,
    min_p: opt.MinPOption = 0.0,
    seed: opt.SeedOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    stop_token_id: opt.StopTokenIdOption = None,
    address: opt.AddressOption = DEFAULT_ADDRESS,
) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D leaves; /help tells more."""
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
    # One loop for the whole conversation, run for one answer at a time: between answers the terminal has the thread,
    # and Ctrl-C cancels no more than the answer that is running.
    with asyncio.Runner() as runner:
        with told_plainly(address):
            client = runner.run(_open(address))
        try:
            _Conversation(runner, client, options, system).run()
        finally:
            runner.run(client.close())


async def _open(address: str) -> "GatewayClient":
    from shared.client import GatewayClient

    client = GatewayClient(address)
    try:
        info = await client.model_info()
    except BaseException:
        await client.close()
        raise
    if not info.has_chat_template:
        await client.close()
        raise InvalidRequestError(f"{info.engine.model} has no chat template: use `orca generate` instead")
    typer.echo(f"{info.engine.model}; /help tells what else can be typed", err=True)
    return client


class _Conversation:
    """Turns so far, and the loop that adds to them."""

    def __init__(
        self, runner: asyncio.Runner, client: "GatewayClient", options: "GenerateOptions", system: str | None
    ) -> None:
        self._runner = runner
        self._client = client
        self._options = options
        self._system = system
        self._turns: list[ChatMessage] = []

    def run(self) -> None:
        """Read and answer until the user leaves."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and history
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = input(prompt).strip()
            except KeyboardInterrupt:
                typer.echo("\n(Ctrl-D or /quit leaves)", err=True)
                continue
            except EOFError:
                typer.echo(err=True)
                return
            if line == "/quit":
                return
            if line == "/reset":
                self._turns.clear()
                typer.echo("(forgotten)", err=True)
            elif line.startswith("/"):
                typer.echo(_HELP, err=True)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        from shared.client import ChatMessage

        asked = [*self._turns, ChatMessage("user", line)]
        answer: list[str] = []
        try:
            self._runner.run(self._stream(asked, answer))
        except KeyboardInterrupt:
            typer.echo("\n(stopped)", err=True)
        except OrcaError as error:
            hint = "; /reset makes room" if isinstance(error, InvalidRequestError) and self._turns else ""
            typer.secho(f"error: {error}{hint}", fg="red", err=True)
            return
        else:
            typer.echo()
        self._turns = [*asked, ChatMessage("assistant", "".join(answer))]

    async def _stream(self, asked: "list[ChatMessage]", answer: list[str]) -> None:
        from shared.client import ChatMessage

        head = [] if self._system is None else [ChatMessage("system", self._system)]
        async with contextlib.aclosing(self._client.chat([*head, *asked], self._options)) as deltas:
            async for delta in deltas:
                answer.append(delta.text)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
