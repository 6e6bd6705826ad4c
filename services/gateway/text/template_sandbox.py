"""Where a model's Jinja template runs: set up as transformers does, but bounded in time and output.

Knows Jinja. Does not know messages or tools.

Templates come with models, so they run in Jinja's sandbox: they see no attribute that begins with an underscore and
change nothing of the caller's. Ranges, products, the length of the result and the processor time are bounded; time is
looked at in every turn of a loop and every call of a macro, which are all that can go on for ever. Memory is bounded by
these alone: a template is taken from whoever runs the gateway, never from a request.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from jinja2.parser import Parser
    from jinja2.runtime import Context

__all__ = ["SandboxedTemplate"]

_MAX_TEMPLATE_CHARACTERS = 1 << 20
_MAX_RANGE = 10_000
_MAX_EXPONENT = 64
_MAX_REPEATED_LENGTH = 1 << 20
_DEADLINE = "the deadline"
"""The variable of a rendering that has its end; no template can set one with a space in its name."""


class SandboxedTemplate:
    """One template, compiled; it may be rendered in several threads at once.

    Args:
        text: the Jinja text.
        now: the local time, for templates that state the date.
        max_characters: longest text that `render` may give.
        max_cpu_s: processor time that `render` may take, seconds.

    Raises:
        ModelError: the text is no valid Jinja.
    """

    def __init__(
        self, text: str, *, now: Callable[[], datetime], max_characters: int = 1 << 24, max_cpu_s: float = 2.0
    ) -> None:
        self._max_characters = max_characters
        self._max_cpu_s = max_cpu_s
        if len(text) > _MAX_TEMPLATE_CHARACTERS:
            raise ModelError(
                f"the chat template is longer than {_MAX_TEMPLATE_CHARACTERS} characters: check the model's files"
            )
        environment = _Environment(now)
        try:
            tree = environment.parse(text)
            self.variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
            """All names that it reads, its own ones included."""
            _watch_the_time(tree, environment)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"line {error.lineno} of the chat template is no valid Jinja: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # from compiling what Jinja made of it
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """The text; raises whatever a program may raise, `jinja2.TemplateError` for what the template refuses."""
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate({**variables, _DEADLINE: time.thread_time() + self._max_cpu_s}):
            length += len(piece)
            if length > self._max_characters:
                raise jinja2.TemplateRuntimeError(f"it gives more than {self._max_characters} characters")
            pieces.append(piece)
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up (``transformers.utils.chat_template_utils``)."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["range"] = _bounded_range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda layout: now().strftime(layout)
        del self.globals["lipsum"]  # a loop as long as its argument says

    @pass_context
    def check_time(self, context: Context) -> None:
        """End a rendering that has taken too long."""
        if time.thread_time() > context.parent[_DEADLINE]:
            raise jinja2.TemplateRuntimeError("it takes too long: does it have an endless loop?")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products that fill the memory; everything else is as it always is."""
        if operator == "**" and isinstance(right, int) and right > _MAX_EXPONENT:
            raise jinja2.TemplateRuntimeError(f"an exponent of more than {_MAX_EXPONENT}")
        for repeated, count in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(count, int):
                if len(repeated) * count > _MAX_REPEATED_LENGTH:
                    raise jinja2.TemplateRuntimeError(f"a text or list repeated {count} times")
                break
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _watch_the_time(tree: nodes.Template, environment: _Environment) -> None:
    """Let every body that can run again and again begin with a look at the clock."""
    bodies: list[nodes.For | nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.For)]
    bodies += [*tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
    for repeated in bodies:
        look = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None))
        look.set_lineno(repeated.lineno).set_environment(environment)
        repeated.body.insert(0, look)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_range(*arguments: int) -> range:
    numbers = range(*arguments)
    if len(numbers) > _MAX_RANGE:
        raise jinja2.TemplateRuntimeError(f"range() of more than {_MAX_RANGE} numbers")
    return numbers


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
