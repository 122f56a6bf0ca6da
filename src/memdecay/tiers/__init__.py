"""What becomes of pages that lose their place in a cache, so that they can come back."""

from memdecay.engine.graded import BITS
from memdecay.tiers.levels import Levels
from memdecay.tiers.memory import TieredMemory
from memdecay.tiers.packing import nbytes
from memdecay.tiers.quantized import Quantized, quantize
from memdecay.tiers.recall import Outside, PageStore
from memdecay.tiers.settings import Tiers
from memdecay.tiers.stores import DiskStore, HostStore, Store, TierWarning
from memdecay.tiers.summaries import Summaries, rank
from memdecay.tiers.words import Words, rank_by_words

__all__ = [
    "BITS",
    "DiskStore",
    "HostStore",
    "Levels",
    "Outside",
    "PageStore",
    "Quantized",
    "Store",
    "Summaries",
    "TierWarning",
    "TieredMemory",
    "Tiers",
    "Words",
    "nbytes",
    "quantize",
    "rank",
    "rank_by_words",
]
