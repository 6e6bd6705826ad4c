"""How to generate: the options that ``generate`` and ``chat`` share, and that ``/set`` changes in a conversation.

One table says how each is written and which field of ``GenerateOptions`` it sets; what is not given stays as the
command has it. Ranges are those of the contract.
"""

import dataclasses
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer

from services.cli.option_group import taking
from services.cli.option_values import (
    file_text,
    json_schema,
    logit_bias,
    non_empty,
    number,
    switch,
    token_id,
    whole_number,
)
from shared.generation import GenerateOptions, Guidance, GuidanceKind

__all__ = ["OPTIONS", "GenerationOption", "checked", "option_named", "takes_generation"]

_SAMPLING = "Sampling"
_LENGTH = "Length and end"
_CHOICES = "Choices and log probabilities"
_GUIDANCE = "Guidance: what the output must match (one of these)"


@dataclass(frozen=True, slots=True)
class GenerationOption:
    """One option: its name without dashes, and the field that it sets."""

    name: str
    field: str
    panel: str
    metavar: str
    """Empty for a switch, which is on where it is given."""
    parse: Callable[[str], Any]
    """One value from its text; raises ``typer.BadParameter``. A switch has "on" or "off"."""
    help: str
    short: str = ""
    join: Callable[[Sequence[Any]], object] | None = None
    """Of an option that may be given several times: the field's value from all of them."""

    @property
    def key(self) -> str:
        """The name as Python has it."""
        return self.name.replace("-", "_")

    def parameter(self, base: GenerateOptions) -> inspect.Parameter:
        """The option as Typer reads it; None stands for one that is not given, an empty list likewise."""
        default = getattr(base, self.field)
        is_number = isinstance(default, float | int) and not isinstance(default, bool)
        names = [f"--{self.name}", *([f"-{self.short}"] if self.short else [])]
        annotation: Any = cast("Any", Annotated)[
            (str if self.join is None else list[str]) | None if self.metavar else bool | None,
            typer.Option(
                *names,
                parser=self.parse if self.metavar else None,
                metavar=self.metavar or None,
                show_default=False,
                rich_help_panel=self.panel,
                help=f"{self.help} Default: {default:g}." if is_number else self.help,
            ),
        ]
        return inspect.Parameter(self.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def value(self, given: Any) -> object:
        """The field's value, from what Typer made of the command line."""
        if not self.metavar:
            return self.parse("on")
        return given if self.join is None else self.join(given)

    def from_text(self, text: str) -> object:
        """The field's value from what follows the option's name in a conversation.

        Several values have blanks between them, and quotation marks around one that has blanks itself.
        """
        if self.join is None:
            return self.parse(text)
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise typer.BadParameter(f"{error} in {text}") from error
        return self.join([self.parse(word) for word in words])


def _choices(texts: Sequence[str]) -> Guidance:
    return Guidance(GuidanceKind.CHOICES, choices=tuple(texts))


def _guidance(kind: GuidanceKind, parse: Callable[[str], str]) -> Callable[[str], Guidance]:
    return lambda text: Guidance(kind, parse(text))


def _json_object(text: str) -> Guidance | None:
    return Guidance(GuidanceKind.JSON_OBJECT) if switch(text) else None


OPTIONS = (
    GenerationOption(
        "temperature",
        "temperature",
        _SAMPLING,
        "NUMBER",
        number(0, 100),
        "0 always takes the likeliest token; higher is more random.",
        "t",
    ),
    GenerationOption(
        "top-k", "top_k", _SAMPLING, "COUNT", whole_number(0, 2**32 - 1), "Keep the k likeliest tokens; 0 keeps all."
    ),
    GenerationOption(
        "top-p",
        "top_p",
        _SAMPLING,
        "SHARE",
        number(0, 1, above=True),
        "Keep the smallest set of tokens with this much probability; 1 keeps all.",
    ),
    GenerationOption(
        "min-p",
        "min_p",
        _SAMPLING,
        "SHARE",
        number(0, 1),
        "Keep tokens at least this times as likely as the likeliest one; 0 keeps all.",
    ),
    GenerationOption(
        "seed", "seed", _SAMPLING, "NUMBER", whole_number(0, 2**64 - 1), "The same seed gives the same tokens, always."
    ),
    GenerationOption(
        "repetition-penalty",
        "repetition_penalty",
        _SAMPLING,
        "FACTOR",
        number(0, 10, above=True),
        "Above 1 makes tokens of prompt and output less likely.",
    ),
    GenerationOption(
        "presence-penalty",
        "presence_penalty",
        _SAMPLING,
        "NUMBER",
        number(-2, 2),
        "Taken off the logit of each token that the output has.",
    ),
    GenerationOption(
        "frequency-penalty",
        "frequency_penalty",
        _SAMPLING,
        "NUMBER",
        number(-2, 2),
        "Taken off the logit of a token for each time that the output has it.",
    ),
    GenerationOption(
        "logit-bias",
        "logit_bias",
        _SAMPLING,
        "ID=VALUE",
        logit_bias,
        "Add this to the logit of one token; -100 forbids it. May be given several times.",
        join=dict,
    ),
    GenerationOption(
        "max-tokens",
        "max_tokens",
        _LENGTH,
        "COUNT",
        whole_number(0, 2**31 - 1),
        "Output tokens at most; a chat may have all that the context leaves.",
        "n",
    ),
    GenerationOption(
        "min-tokens",
        "min_tokens",
        _LENGTH,
        "COUNT",
        whole_number(0, 2**31 - 1),
        "Nothing ends the output before it has so many tokens, --max-tokens aside.",
    ),
    GenerationOption(
        "stop",
        "stop",
        _LENGTH,
        "TEXT",
        non_empty,
        "A text that ends the output and is not part of it. May be given several times.",
        join=tuple,
    ),
    GenerationOption(
        "stop-token-id",
        "stop_token_ids",
        _LENGTH,
        "ID",
        token_id,
        "Id of a token that ends the output. May be given several times.",
        join=tuple,
    ),
    GenerationOption("ignore-eos", "ignore_eos", _LENGTH, "", switch, "Go on past the model's own end of text."),
    GenerationOption(
        "timeout", "timeout_s", _LENGTH, "SECONDS", number(0, 86400, above=True), "Give up after so long."
    ),
    GenerationOption("n", "n", _CHOICES, "COUNT", whole_number(1, 128), "Outputs, printed one after the other."),
    GenerationOption(
        "best-of",
        "best_of",
        _CHOICES,
        "COUNT",
        whole_number(1, 128),
        "Generate so many and return the --n likeliest ones.",
    ),
    GenerationOption(
        "logprobs",
        "num_logprobs",
        _CHOICES,
        "COUNT",
        whole_number(0, 20),
        "Show how likely each token was, and so many of the likeliest ones.",
    ),
    GenerationOption("json-object", "guidance", _GUIDANCE, "", _json_object, "Any JSON object."),
    GenerationOption(
        "json-schema",
        "guidance",
        _GUIDANCE,
        "FILE|TEXT",
        _guidance(GuidanceKind.JSON_SCHEMA, json_schema),
        "JSON of this schema: a file, or the schema itself.",
    ),
    GenerationOption(
        "regex",
        "guidance",
        _GUIDANCE,
        "PATTERN",
        _guidance(GuidanceKind.REGEX, non_empty),
        "A regular expression, matched by the whole output.",
    ),
    GenerationOption(
        "choice",
        "guidance",
        _GUIDANCE,
        "TEXT",
        non_empty,
        "One of the texts that this option is given with.",
        join=_choices,
    ),
    GenerationOption(
        "grammar",
        "guidance",
        _GUIDANCE,
        "FILE",
        _guidance(GuidanceKind.GRAMMAR, file_text),
        "A context-free grammar in Lark's notation.",
    ),
)


def takes_generation(base: GenerateOptions) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all of `OPTIONS`; its first parameter gets ``base`` with what was given."""

    def build(**given: Any) -> GenerateOptions:
        return _built(base, given)

    return lambda command: taking(command, "options", [option.parameter(base) for option in OPTIONS], build)


def option_named(name: str) -> GenerationOption:
    """The option of that name, with or without dashes before it. Raises ``typer.BadParameter`` where there is none."""
    plain = name.removeprefix("--").replace("_", "-")
    for option in OPTIONS:
        if plain == option.name:
            return option
    raise typer.BadParameter(f"there is no option {name}; the options are {', '.join(one.name for one in OPTIONS)}")


def _built(base: GenerateOptions, given: Mapping[str, Any]) -> GenerateOptions:
    changes: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    for option in OPTIONS:
        value = given[option.key]
        if value is None or value in ([], ()):
            continue
        if option.field in changes:
            raise typer.BadParameter(f"--{set_by[option.field]} and --{option.name} exclude each other: give one")
        changes[option.field] = option.value(value)
        set_by[option.field] = option.name
    return checked(dataclasses.replace(base, **changes))


def checked(options: GenerateOptions) -> GenerateOptions:
    """Return the options; raise ``typer.BadParameter`` where they cannot go together."""
    if options.best_of is not None and options.best_of < options.n:
        raise typer.BadParameter(f"--best-of {options.best_of} is below --n {options.n}")
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise typer.BadParameter(f"--min-tokens {options.min_tokens} is above --max-tokens {options.max_tokens}")
    return options
