"""Eviction policies: a score per kept token, and one shared selection under the budget.

The algorithm of the paper is `memdecay.policy.retention` (equations 2-4) and
`memdecay.policy.pages` (equation 5 and Algorithm 1). Pure torch, any device.
"""

from memdecay.policy.base import HeadPolicy, Policy, Tokens
from memdecay.policy.registry import (
    DEFAULT_POLICY,
    available,
    from_config,
    get_policy,
    policy_config,
)

__all__ = [
    "DEFAULT_POLICY",
    "HeadPolicy",
    "Policy",
    "Tokens",
    "available",
    "from_config",
    "get_policy",
    "policy_config",
]
