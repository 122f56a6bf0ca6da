"""What every attention here does alike to its logits, whichever keys it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memdecay.errors import ModelError

LOWEST = torch.finfo(torch.float32).min
"""The logit of what is hidden; minus infinity would make NaN where all is."""


def scale_of(
    module: torch.nn.Module, query: Tensor, scaling: float | None, others: Mapping[str, Any]
) -> float:
    """Return the factor of the logits, 1/sqrt(head_dim) unless the model says otherwise.

    Args:
        module: the attention module.
        query: `(..., head_dim)`.
        scaling: what the model says, or None.
        others: the other keyword arguments of transformers' attention functions.

    Raises:
        ModelError: the model adds something to the logits.
    """
    if others.get("position_bias") is not None:
        raise ModelError(
            f"{type(module).__name__} adds a position bias, which memdecay cannot serve."
        )
    return 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logits under the tanh cap of the model, if it has one (Gemma 2)."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
