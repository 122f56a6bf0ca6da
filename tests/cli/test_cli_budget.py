from __future__ import annotations

import pytest

from memdecay.cli._budget import parse_budget
from memdecay.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "total", "tokens"),
    [
        ("1024", 500, 1024),
        (" 1 ", 500, 1),
        ("25%", 1106, 276),
        ("25 %", 1106, 276),
        ("100%", 7, 7),
        ("12.5%", 1000, 125),
    ],
)
def test_a_budget_is_tokens_or_a_share_rounded_down(text: str, total: int, tokens: int) -> None:
    assert parse_budget(text).resolve(total) == tokens


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "0%", "-25%", "250%", "100.1%", "nan", "NaN%", "inf", "", " ", "%", "0.25", "1e3",
     "1_000", "１２", "25%%", "25% of it", "0x10", "9" * 40],
)  # fmt: skip
def test_anything_else_is_one_sentence_with_the_value(text: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(text)
    assert repr(text) in str(caught.value)
    assert "1024" in str(caught.value) and "25%" in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_a_share_of_almost_nothing_is_refused() -> None:
    with pytest.raises(BudgetError, match="less than one of 30 tokens"):
        parse_budget("1%").resolve(30)
