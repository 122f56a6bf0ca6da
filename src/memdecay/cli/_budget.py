"""Read how many tokens: a number of them, or a share of a conversation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from memdecay.errors import BudgetError

_TOKENS = re.compile(r"[0-9]{1,12}")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")


@dataclass(frozen=True)
class Budget:
    """Tokens as they were asked for: exactly one of `tokens` and `share` (0 to 1) is given."""

    text: str
    tokens: int | None = None
    share: float | None = None
    option: str = "--budget"

    def resolve(self, total: int) -> int:
        """Return it in tokens for a conversation of `total` tokens.

        Raises:
            BudgetError: the share of this conversation is less than one token.
        """
        if self.tokens is not None:
            return self.tokens
        tokens = math.floor(total * (self.share or 0.0))
        if tokens < 1:
            raise BudgetError(
                f"{self.option} is {self.text!r}, but that is less than one of {total:,} tokens."
            )
        return tokens


def parse_budget(text: str) -> Budget:
    """Read `1024` or `25%`.

    Raises:
        BudgetError: one sentence with the text and what is allowed.
    """
    value = text.strip()
    if _TOKENS.fullmatch(value) and int(value) > 0:
        return Budget(value, tokens=int(value))
    share = _SHARE.fullmatch(value)
    if share and 0 < float(share[1]) <= 100:
        return Budget(value, share=float(share[1]) / 100)
    raise BudgetError(
        f"--budget is {text!r}, but must be a whole number of tokens of at least 1, such as 1024, "
        f"or a share above 0% and up to 100%, such as 25%."
    )
