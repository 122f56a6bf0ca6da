"""What a chat template can do, found out by rendering small conversations with it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memdecay.prompt.template import RenderError, Template

_WORD = "zqwxword"
_TOOL = "zqwxtool"
_CALL_ID = "zqwx00001"


@dataclass(frozen=True)
class Traits:
    """What a chat template renders.

    Args:
        tool_calls: whether the `tool_calls` of an assistant message appear.
        arguments_as_text: whether call arguments must be JSON text instead of mappings.
        calls_need_null: whether calls appear only when the content is null.
        short_ids: whether call ids must have nine characters (Mistral).
        tool_role: whether messages of role tool appear.
        tools: whether tool schemas appear.
        reasoning: whether `reasoning_content` of the newest answer appears.
        developer: whether the template names the developer role.
        content_as_parts: whether content must be a list of parts.
        header: role -> the text between the start of a message and its content.
        closing: role -> the text after the content.
    """

    tool_calls: bool = False
    arguments_as_text: bool = False
    calls_need_null: bool = False
    short_ids: bool = False
    tool_role: bool = False
    tools: bool = False
    reasoning: bool = False
    developer: bool = False
    content_as_parts: bool = False
    header: Mapping[str, str] = field(default_factory=dict)
    closing: Mapping[str, str] = field(default_factory=dict)


def probe(template: Template) -> Traits:
    """Find out what a template renders; a template that raises on everything has no traits."""
    prober = _Prober(template)
    calls = prober.tool_calls()
    header, closing = prober.frame(calls)
    return replace(
        calls,
        tool_role=prober.tool_role(calls),
        tools=prober.tools(),
        reasoning=prober.reasoning(),
        developer="developer" in template.source,
        content_as_parts=prober.as_parts,
        header=header,
        closing=closing,
    )


class _Prober:
    """Renders probe conversations with one template."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self.as_parts = False
        self.as_parts = not self._shows(_WORD, [self._say("user", _WORD)]) and self._shows(
            _WORD, [{"role": "user", "content": [{"type": "text", "text": _WORD}]}]
        )

    def _say(self, role: str, text: str, **fields: Any) -> dict[str, Any]:
        content: Any = [{"type": "text", "text": text}] if self.as_parts else text
        return {"role": role, "content": content, **fields}

    def _shows(self, words: str, turns: Sequence[Mapping[str, Any]], tools: Any = None) -> bool:
        try:
            return words in self._template.render(turns, tools=tools).text
        except RenderError:
            return False

    def _exchange(self, traits: Traits, call_id: str = _CALL_ID) -> list[dict[str, Any]]:
        """Return a question, a call and its result."""
        arguments: Any = '{"zqwxkey": "v"}' if traits.arguments_as_text else {"zqwxkey": "v"}
        function = {"name": _TOOL, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        action = self._say("assistant", "", tool_calls=[call])
        if traits.calls_need_null:
            action["content"] = None
        return [self._say("user", "q"), action, self._result(call_id)]

    def _result(self, call_id: str = _CALL_ID) -> dict[str, Any]:
        return self._say("tool", _WORD, tool_call_id=call_id, name=_TOOL)

    def tool_calls(self) -> Traits:
        """Find out how calls have to be written to appear, if they can."""
        for null, as_text in itertools.product((False, True), repeat=2):
            traits = Traits(tool_calls=True, arguments_as_text=as_text, calls_need_null=null)
            turns = self._exchange(traits)
            for shown in ([*turns, self._say("assistant", "a")], turns[:2]):
                if self._shows(_TOOL, shown) and self._shows("zqwxkey", shown):
                    long_ids = self._exchange(traits, "zqwx_long_call_id")[: len(shown)]
                    return replace(traits, short_ids=not self._shows(_TOOL, long_ids))
        return Traits()

    def tool_role(self, calls: Traits) -> bool:
        """Return whether the result of a call, or a tool message after a text, appears."""
        turns = self._exchange(calls)
        if not calls.tool_calls:
            turns[1] = self._say("assistant", "a")
        return self._shows(_WORD, turns) or self._shows(
            _WORD, [*turns, self._say("assistant", "a")]
        )

    def tools(self) -> bool:
        schema = {
            "type": "function",
            "function": {
                "name": _TOOL,
                "description": "d",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        user = [self._say("user", "q")]
        return self._shows(_TOOL, user, [schema]) or self._shows(
            _TOOL, [self._say("system", "s"), *user], [schema]
        )

    def reasoning(self) -> bool:
        fields = {"reasoning_content": _WORD, "thinking": _WORD}
        return self._shows(_WORD, [self._say("user", "q"), self._say("assistant", "a", **fields)])

    def frame(self, calls: Traits) -> tuple[dict[str, str], dict[str, str]]:
        """Return what stands around the content of a message which is neither first nor last.

        Of two tool results in a row, the first one ends as shortly as any, the second one begins
        so (they may share a turn).
        """
        answer = self._say("assistant", "a")
        start = [self._say("user", "q"), answer]
        words = {"user": "zqwxuser", "assistant": "zqwxassistant"}
        around = self._around(
            [*start, *(self._say(role, word) for role, word in words.items()), *start],
            [words["user"], words["assistant"]],
        )
        header = {role: around[word][0] for role, word in words.items() if word in around}
        closing = {role: around[word][1] for role, word in words.items() if word in around}
        first, second = "zqwxfirst", "zqwxsecond"
        exchange = self._exchange(calls) if calls.tool_calls else [*start, self._result()]
        results = [{**exchange[2], **self._say("tool", word)} for word in (first, second)]
        around = self._around([*exchange[:2], *results, answer], [first, second])
        if first in around and second in around:
            header["tool"], closing["tool"] = around[second][0], around[first][1]
        return header, closing

    def _around(
        self, turns: Sequence[Mapping[str, Any]], words: Sequence[str]
    ) -> dict[str, tuple[str, str]]:
        """Return the text ahead of each word and behind it, within its message."""
        try:
            rendering = self._template.render(turns)
        except RenderError:
            return {}
        found = {}
        for segment in rendering.segments:
            text = rendering.text[segment.start : segment.end]
            for word in words:
                if segment.turn is not None and text.count(word) == 1:
                    ahead, behind = text.split(word)
                    found[word] = (ahead, behind)
        return found
