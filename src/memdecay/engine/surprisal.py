"""How unexpected each token was when it was read: -log p, from the hidden states before it.

The last hidden state of a token says which token comes next, in the same forward or in a later
one. So those of the newest tokens are held: as long as their successors are not worked out yet,
and a little longer, as a rollback may give a token another successor.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memdecay.engine.logits import capped
from memdecay.errors import ModelError

HELD = 64
"""Tokens that may wait until they are worked out together; so many hidden states are held."""

_BLOCK = 128
"""Tokens whose logits exist at a time."""

_SCALES = ("logits_scaling", "logit_scale", "output_multiplier_scale")
"""What other families do to their logits; none of those that are served has it."""


class Head:
    """What a model makes of its last hidden states: the likelihood of the next token.

    Args:
        model: with an output embedding.
        vocabulary: how many ids the likelihood is normalised over, the lowest ones and the token
            itself; None for all. Byte-pair ids are given by frequency, so those left out are rare.

    Raises:
        ModelError: the model has no output embedding, or scales its logits in an unknown way.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: int | None) -> None:
        module = model.get_output_embeddings()
        name = type(model).__name__
        if module is None:
            raise ModelError(
                f"Model {name} has no output embedding, but the policy needs surprisal; use the "
                f"model with its language-modelling head."
            )
        for scale in _SCALES:
            value = getattr(model.config, scale, None)
            if value not in (None, 1):
                raise ModelError(
                    f"Model {name} has {scale}={value!r}, but surprisal is only known for models "
                    f"that do not scale their logits."
                )
        self._module = module
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        # A quantized head has no rows to choose from, and is asked for all of them.
        plain = type(module) is torch.nn.Linear
        every = not plain or vocabulary is None or vocabulary >= module.out_features
        self._rows = None if every else vocabulary

    def surprisal(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return -log p of the tokens that came next.

        Args:
            hidden: (n, hidden_size), the last hidden states of n tokens.
            ids: (n,) int64, for each the token after it.

        Returns:
            (n,) float32, nats.
        """
        blocks = zip(hidden.split(_BLOCK), ids.split(_BLOCK), strict=True)
        return torch.cat([self._surprisal(*block) for block in blocks])

    def _surprisal(self, hidden: Tensor, ids: Tensor) -> Tensor:
        if self._rows is None:
            logits = self._capped(self._module(hidden))
            return (logits.logsumexp(-1) - logits.gather(1, ids[:, None])[:, 0]).clamp_(min=0)
        weight, bias, rows = self._module.weight, self._module.bias, self._rows
        some = None if bias is None else bias[:rows]
        logits = self._capped(torch.nn.functional.linear(hidden, weight[:rows], some))
        own = (hidden.float() * weight[ids].float()).sum(-1)
        own = self._capped(own if bias is None else own + bias[ids].float())
        inside = ids < rows
        own = torch.where(inside, logits.gather(1, ids.clamp(max=rows - 1)[:, None])[:, 0], own)
        total = logits.logsumexp(-1)
        total = torch.where(inside, total, torch.logaddexp(total, own))
        return (total - own).clamp_(min=0)

    def _capped(self, logits: Tensor) -> Tensor:
        return capped(logits.float(), self._softcap)


@dataclass(frozen=True)
class _Run:
    """Tokens of one forward: the first's position, `(n, hidden_size)`, and `(n,)` ids if known."""

    start: int
    hidden: Tensor
    ids: Tensor | None

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + len(self.hidden)

    def known_ids(self) -> Tensor:
        """Return `(n,)` int64, -1 for what was given as embeddings."""
        if self.ids is not None:
            return self.ids
        return torch.full((len(self.hidden),), -1, device=self.hidden.device)

    def until(self, position: int) -> _Run:
        """Return those of them before a position."""
        count = min(position - self.start, len(self.hidden))
        ids = None if self.ids is None else self.ids[:count]
        return _Run(self.start, self.hidden[:count], ids)

    def newest(self, count: int) -> _Run:
        """Return a copy of the last ones, so that the others are freed."""
        if count >= len(self.hidden):
            return self
        ids = None if self.ids is None else self.ids[-count:].clone()
        return _Run(self.end - count, self.hidden[-count:].clone(), ids)


@dataclass(frozen=True)
class Trail:
    """The newest hidden states of one sequence, and how far surprisal is worked out.

    It is never changed: each method returns another one, so a copy of a ledger may share it.

    Args:
        head: of the model.
        runs: their positions follow each other without a gap.
        settled: position before which there is nothing left to work out.
    """

    head: Head
    runs: tuple[_Run, ...] = ()
    settled: int = 0

    @property
    def waiting(self) -> int:
        """Tokens whose surprisal is not worked out yet."""
        return self.runs[-1].end - self.settled if self.runs else 0

    def add(self, start: int, hidden: Tensor, ids: Tensor | None) -> Trail:
        """Take in the next tokens.

        Args:
            start: position of the first of them.
            hidden: (n, hidden_size), their last hidden states.
            ids: (n,) int64, None if they were given as embeddings.
        """
        if not len(hidden):
            return self
        run = _Run(start, hidden.detach().clone(), ids)
        known = self.runs if self.runs and self.runs[-1].end == start else ()
        settled = self.settled if known else start
        return dataclasses.replace(self, runs=(*known, run), settled=settled)

    def work_out(self) -> tuple[int, Tensor] | None:
        """Return (first position, `(n,)` float32 surprisal) of those that wait; None if none do."""
        if not self.runs:
            return None
        start, end = self.runs[0].start, self.runs[-1].end
        first = max(self.settled, start + 1)
        if first >= end:
            return None
        hidden = torch.cat([run.hidden for run in self.runs])[first - 1 - start : -1]
        ids = torch.cat([run.known_ids() for run in self.runs])[first - start :]
        surprisal = self.head.surprisal(hidden, ids.clamp(min=0))
        return first, surprisal.masked_fill_(ids < 0, 0)

    def worked_out(self) -> Trail:
        """Return the trail with nothing left that waits."""
        return dataclasses.replace(self, settled=self.runs[-1].end) if self.runs else self

    def trimmed(self) -> Trail:
        """Return the trail without the hidden states that neither wait nor may be asked for."""
        if not self.runs or self.runs[-1].end - self.runs[0].start <= 2 * HELD:
            return self
        needed = max(HELD, self.waiting + 1)
        runs: list[_Run] = []
        for run in reversed(self.runs):
            if needed <= 0:
                break
            runs.insert(0, run.newest(needed))
            needed -= len(run.hidden)
        return dataclasses.replace(self, runs=tuple(runs))

    def rewind(self, seen: int) -> Trail:
        """Forget the tokens from position `seen` on."""
        if not self.runs or self.runs[-1].end <= seen:
            return self
        runs = tuple(run.until(seen) for run in self.runs if run.start < seen)
        return dataclasses.replace(self, runs=runs, settled=min(self.settled, seen))

    def hidden(self) -> Tensor | None:
        """Return what is held, `(n, hidden_size)` of the last n tokens; None if nothing is."""
        return torch.cat([run.hidden for run in self.runs]) if self.runs else None

    def restored(self, hidden: Tensor, seen: int) -> Trail:
        """Return a trail that holds these, of the last tokens of `seen`, and waits for nothing."""
        run = _Run(seen - len(hidden), hidden, None)
        return dataclasses.replace(self, runs=(run,), settled=seen)
