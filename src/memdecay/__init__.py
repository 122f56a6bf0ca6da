"""Region-aware KV-cache memory for LLM agents.

`Session` and what else needs transformers is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memdecay.errors import (
    BudgetError,
    MemDecayError,
    ModelError,
    PolicyError,
    ProfileError,
    SessionError,
    TraceError,
)
from memdecay.policy import Policy, get_policy
from memdecay.prompt import Conversation, load_trace
from memdecay.regions import REGIONS, Profile, RegionPolicy

if TYPE_CHECKING:
    from memdecay.engine import MemDecayCache, Session, load_model
    from memdecay.tiers import Tiers

__version__ = "0.1.0"

_LAZY = {
    "MemDecayCache": "memdecay.engine",
    "Session": "memdecay.engine",
    "Tiers": "memdecay.tiers",
    "load_model": "memdecay.engine",
}

__all__ = [
    "REGIONS",
    "BudgetError",
    "Conversation",
    "MemDecayCache",
    "MemDecayError",
    "ModelError",
    "Policy",
    "PolicyError",
    "Profile",
    "ProfileError",
    "RegionPolicy",
    "Session",
    "SessionError",
    "Tiers",
    "TraceError",
    "__version__",
    "get_policy",
    "load_model",
    "load_trace",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'memdecay' has no attribute {name!r}")
