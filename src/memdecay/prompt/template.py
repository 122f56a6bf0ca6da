"""Renders a chat template once, and says which message every character came from.

The template is parsed, and before the body of every `for` loop a call is inserted which emits a
marker when the loop variable is one of the messages. The output is split at the markers and the
markers are dropped, so the text is exactly what the template makes: messages themselves are never
touched, and a template that trims, tests or merges contents behaves as always.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from memdecay.errors import TraceError

_MARK, _AFTER = "memdecay_mark", "memdecay_after"


@dataclass(frozen=True)
class Segment:
    """A run of characters written while the template was at one message (None: at none)."""

    turn: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Rendering:
    """The text of a conversation and the segments that tile it."""

    text: str
    segments: list[Segment]


class RenderError(Exception):
    """The template refused a conversation; `turn` is the message it was at, if known."""

    def __init__(self, reason: str, turn: int | None) -> None:
        """Keep the reason in one line."""
        super().__init__(" ".join(reason.split()) or "no reason given")
        self.turn = turn


class _Turn(dict[str, Any]):
    """A message as the template sees it: a dict that also knows its place."""

    turn_index = 0


@dataclass
class _Tracker:
    """Emits the markers of one rendering and remembers where it was."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(12))
    current: int | None = None
    _is_turn_loop: dict[int, bool] = field(default_factory=dict)

    def mark(self, loop: int, items: Sequence[Any]) -> str:
        turn = next((item for item in items if isinstance(item, _Turn)), None)
        self._is_turn_loop[loop] = turn is not None
        if turn is None:
            return ""
        self.current = turn.turn_index
        return f"\x02{self.nonce}:{loop}:{turn.turn_index}\x03"

    def after(self, loop: int) -> str:
        if not self._is_turn_loop.pop(loop, False):
            return ""
        self.current = None
        return f"\x02{self.nonce}:{loop}:-\x03"

    def split(self, marked: str) -> Rendering:
        """Cut the markers out; a loop that ends gives way to the loop around it."""
        pieces = re.split(f"\x02{self.nonce}:(\\d+):(-|\\d+)\x03", marked)
        segments: list[Segment] = []
        open_loops: list[tuple[int, int]] = []
        text, position = [pieces[0]], len(pieces[0])
        if pieces[0]:
            segments.append(Segment(None, 0, position))
        for loop, turn, chunk in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            number = int(loop)
            known = [i for i, (opened, _) in enumerate(open_loops) if opened == number]
            if known:
                del open_loops[known[0] :]
            if turn != "-":
                open_loops.append((number, int(turn)))
            if chunk:
                owner = open_loops[-1][1] if open_loops else None
                segments.append(Segment(owner, position, position + len(chunk)))
                text.append(chunk)
                position += len(chunk)
        return Rendering("".join(text), segments)


class _Generation(jinja2.ext.Extension):
    """Lets `{% generation %}` blocks, which transformers knows, pass their body through."""

    tags = {"generation"}  # noqa: RUF012 – jinja reads it from the class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Template:
    """A chat template, compiled with markers.

    Args:
        source: the jinja source.
        variables: what the template sees besides messages and tools (bos_token, eos_token, ...).

    Raises:
        TraceError: the source is not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Parse, insert the markers and compile."""
        self.source = source
        self._variables = dict(variables)
        environment = _environment()
        try:
            tree = environment.parse(source)
            _instrument(tree, environment)
            # compile() accepts a syntax tree too, but its overloads do not say so for the result.
            code = environment.compile(tree)
            self._template = jinja2.Template.from_code(
                environment, code, environment.make_globals(None)
            )
        except jinja2.TemplateError as error:
            reason = " ".join(str(error).split())
            raise TraceError(
                f"The tokenizer's chat_template is not a valid template ({reason})."
            ) from None

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """Render messages as the template sees them.

        Args:
            turns: the messages, as the template wants them.
            tools: tool schemas.
            add_generation_prompt: whether to open an assistant answer at the end.

        Raises:
            RenderError: the template raised.
        """
        tracker = _Tracker()
        try:
            marked = self._render(tracker, turns, tools, add_generation_prompt)
        except Exception as error:  # a template is foreign code and raises anything
            raise RenderError(str(error) or type(error).__name__, tracker.current) from None
        rendering = tracker.split(marked)
        if any(segment.turn is not None for segment in rendering.segments):
            return rendering
        return self._by_prefixes(rendering.text, turns, tools)

    def _render(
        self,
        tracker: _Tracker,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        messages = []
        for index, turn in enumerate(turns):
            message = _Turn(turn)
            message.turn_index = index
            messages.append(message)
        return self._template.render(
            {
                **self._variables,
                "messages": messages,
                "tools": list(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                _MARK: tracker.mark,
                _AFTER: tracker.after,
            }
        )

    def _by_prefixes(
        self, text: str, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> Rendering:
        """Find the segments of a template that does not loop over its messages.

        Message k ends where the rendering of messages 0..k stops agreeing with the whole.
        """
        segments, start = [], 0
        for count in range(1, len(turns) + 1):
            try:
                prefix = self._render(_Tracker(), turns[:count], tools, False)
            except Exception:  # the template wants more messages: its text goes to the next one
                continue
            end = max(start, common_prefix(prefix, text))
            if end > start:
                segments.append(Segment(count - 1, start, end))
                start = end
        if start < len(text):
            segments.append(Segment(None, start, len(text)))
        return Rendering(text, segments)


def common_prefix(left: str, right: str) -> int:
    """Return how many leading characters two texts share."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _instrument(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Insert the marker calls, in place."""
    numbers = itertools.count()

    def emit(function: str, *arguments: nodes.Expr) -> nodes.Output:
        call = nodes.Call(nodes.Name(function, "load"), list(arguments), [], None, None)
        return nodes.Output([call])

    def walk(node: nodes.Node) -> None:
        for child in node.iter_child_nodes():
            walk(child)
        for name in node.fields:
            value = getattr(node, name)
            if isinstance(value, list) and any(isinstance(item, nodes.For) for item in value):
                setattr(node, name, [new for item in value for new in with_marks(item)])

    def with_marks(item: nodes.Node) -> list[nodes.Node]:
        if not isinstance(item, nodes.For):
            return [item]
        loop = next(numbers)
        names = [n.name for n in item.target.find_all(nodes.Name)]
        if isinstance(item.target, nodes.Name):
            names = [item.target.name]
        items = nodes.List([nodes.Name(name, "load") for name in names])
        item.body.insert(0, emit(_MARK, nodes.Const(loop), items))
        return [item, emit(_AFTER, nodes.Const(loop))]

    walk(tree)
    for node in tree.find_all(nodes.Node):
        if getattr(node, "lineno", None) is None:
            node.lineno = 1
    tree.set_environment(environment)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers renders chat templates in."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    strftime: Callable[[str], str] = lambda form: datetime.now().strftime(form)  # noqa: E731
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime
    return environment
