"""Every installed policy, ours and third parties', under the same contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memdecay.policy import Policy, available, get_policy
from memdecay.policy.testing import CHECKS

VARIANTS: dict[str, list[dict[str, object]]] = {
    "memdecay-paper": [{"init": "zero"}, {"refresh_threshold": 0.01, "attention_weight": 0.0}],
    "snapkv": [{"pooling": "avg", "kernel_size": 3}, {"kernel_size": 1, "window": 1}],
    "streaming": [{"sinks": 0}],
    "random": [{"seed": 3}],
    "h2o": [{"recent": 0}],
    "observation_masking": [{"keep_newest": 0}],
    "memdecay": [{"usage_offset": 0.0, "prior_weight": 0.0}, {"sinks": 0, "recent": 0}],
    "memdecay-replay": [{"usage_offset": 3.0}, {"sinks": 0, "recent": 0}],
}
POLICIES = [
    pytest.param(name, params, id="-".join([name, *(f"{k}={v}" for k, v in params.items())]))
    for name in available()
    for params in [{}, *VARIANTS.get(name, [])]
]


def test_the_policies_of_the_issue_are_installed() -> None:
    expected = "full h2o memdecay-paper observation_masking random snapkv streaming tova"
    ours = "memdecay memdecay-replay"
    assert {*expected.split(), *ours.split()} <= set(available())
    assert set(VARIANTS) <= set(available())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("name", "params"), POLICIES)
def test_contract(check: Callable[[Policy], None], name: str, params: dict[str, object]) -> None:
    check(get_policy(name, **params))
