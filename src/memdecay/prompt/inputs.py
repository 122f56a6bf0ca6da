"""What a conversation is given: its tokenizer, its options, a saved state."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from memdecay.errors import ModelError, SessionError, TraceError
from memdecay.prompt.template import Template
from memdecay.prompt.traits import Traits, probe
from memdecay.prompt.types import Tokenizer

STATE_VERSION = 1


@functools.lru_cache(maxsize=16)
def compiled(source: str, special: tuple[tuple[str, str], ...]) -> tuple[Template, Traits]:
    """Return a template and what it renders; the same template is tried once."""
    template = Template(source, dict(special))
    return template, probe(template)


def template_source(tokenizer: Tokenizer, has_tools: bool) -> str:
    """Return the jinja source of the chat template, the one for tools if there are two."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        named = source.get("tool_use") if has_tools else None
        source = named or source.get("default")
    if not isinstance(source, str) or not source:
        raise ModelError(
            f"The tokenizer {type(tokenizer).__name__} has no chat_template, "
            "but labelling needs one to write messages as the model knows them."
        )
    return source


def special_tokens(tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Return what the template may name: bos_token, eos_token and the like."""
    named = getattr(tokenizer, "special_tokens_map", None) or {}
    return tuple(sorted((str(k), str(v)) for k, v in named.items() if isinstance(v, str)))


def control_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the strings that the tokenizer reads as special tokens, longest first."""
    found = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found |= {str(t) for t in added.values() if getattr(t, "special", False)}
    return tuple(sorted((t for t in found if t.strip()), key=lambda t: (-len(t), t)))


def tool_names(retrievers: Collection[str]) -> frozenset[str]:
    """Return the names of retrievers, checked."""
    if isinstance(retrievers, str) or not all(isinstance(name, str) for name in retrievers):
        raise TraceError(
            f"retrievers is {retrievers!r}, but it must be a collection of tool names."
        )
    return frozenset(retrievers)


def tool_schemas(tools: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """Return a copy of tool schemas, checked."""
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not all(isinstance(t, Mapping) for t in tools):
        raise TraceError(
            f"tools is a {type(tools).__name__}, but it must be a list of tool schemas (mappings)."
        )
    try:
        copied: list[Any] = json.loads(json.dumps(list(tools)))
    except (TypeError, ValueError, RecursionError):
        raise TraceError("tools holds a value that is not plain JSON, but it must.") from None
    return copied


def check_state(state: Any) -> None:
    """Refuse a saved state which lacks something."""
    kinds = {
        "version": int,
        "template": str,
        "messages": list,
        "tools": list,
        "retrievers": list,
        "tools_in_system": bool,
        "notes": list,
        "canonical": str,
        "tail": str,
        "pending": str,
        "pending_region": str,
    }
    if not isinstance(state, Mapping):
        raise SessionError(f"state is a {type(state).__name__}, but it must be a mapping.")
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            raise SessionError(
                f"state has {key} {state.get(key)!r:.60}, but it must be a {kind.__name__}."
            )
    if state["version"] != STATE_VERSION:
        raise SessionError(
            f"state has version {state['version']}, but only {STATE_VERSION} can be read."
        )


def digest(source: str) -> str:
    """Return a short fingerprint of a template."""
    return hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()[:16]
