"""The engine on transformers: a cache under a budget, and sessions that use it."""

from memdecay.engine.cache import Evicted, MemDecayCache
from memdecay.engine.loading import load_model
from memdecay.engine.report import AppendResult, Generated, Idle, Report, Scores, TierReport
from memdecay.engine.session import Session
from memdecay.engine.support import FAMILIES

__all__ = [
    "FAMILIES",
    "AppendResult",
    "Evicted",
    "Generated",
    "Idle",
    "MemDecayCache",
    "Report",
    "Scores",
    "Session",
    "TierReport",
    "load_model",
]
