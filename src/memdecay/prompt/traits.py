"""What a chat template can do, found out by rendering small conversations with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    arguments_as_text, tool_calls = prober.tool_calls()
    header, closing = prober.frame()
    return Traits(
        tool_calls=tool_calls,
        arguments_as_text=arguments_as_text,
        tool_role=prober.tool_role(tool_calls, arguments_as_text),
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

    def _action(self, arguments: Any) -> dict[str, Any]:
        function = {"name": _TOOL, "arguments": arguments}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        return self._say("assistant", "", tool_calls=[call])

    def _result(self) -> dict[str, Any]:
        return self._say("tool", _WORD, tool_call_id=_CALL_ID, name=_TOOL)

    def tool_calls(self) -> tuple[bool, bool]:
        """Return whether arguments must be text, and whether calls appear at all."""
        for as_text, arguments in ((False, {"zqwxkey": "v"}), (True, '{"zqwxkey": "v"}')):
            start = [self._say("user", "q"), self._action(arguments)]
            for turns in ([*start, self._result(), self._say("assistant", "a")], start):
                if self._shows(_TOOL, turns) and self._shows("zqwxkey", turns):
                    return as_text, True
        return False, False

    def tool_role(self, tool_calls: bool, as_text: bool) -> bool:
        arguments: Any = "{}" if as_text else {}
        action = self._action(arguments) if tool_calls else self._say("assistant", "a")
        start = [self._say("user", "q"), action, self._result()]
        return self._shows(_WORD, start) or self._shows(
            _WORD, [*start, self._say("assistant", "a")]
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

    def frame(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return what stands around the content of a message which is neither first nor last."""
        words = {"user": "zqwxuser", "assistant": "zqwxassistant"}
        turns = [self._say("user", "q"), self._say("assistant", "a")]
        turns += [self._say(role, word) for role, word in words.items()]
        turns += [self._say("user", "q"), self._say("assistant", "a")]
        header: dict[str, str] = {}
        closing: dict[str, str] = {}
        try:
            rendering = self._template.render(turns)
        except RenderError:
            return header, closing
        for place, (role, word) in enumerate(words.items(), start=2):
            for segment in rendering.segments:
                text = rendering.text[segment.start : segment.end]
                if segment.turn == place and text.count(word) == 1:
                    header[role], closing[role] = text.split(word)
        return header, closing
