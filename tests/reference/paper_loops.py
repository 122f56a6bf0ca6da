"""The paper's equations and Algorithm 1, letter by letter and token by token.

Slow on purpose: no vectors, no cleverness.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field


def importance(a: float, mass: float, rho: float) -> float:
    """Equation (2)."""
    return rho * a + (1 - rho) * mass


def refreshed_at(
    inserted_at: float, observations: list[tuple[float, float]], tau: list[float]
) -> float:
    """Equation (3), from the whole history of (step, mass) and the threshold at each step."""
    latest = inserted_at
    for (step, mass), threshold in zip(observations, tau, strict=True):
        if mass >= threshold:
            latest = step
    return latest


def score(b: float, lam: float, age: float, alpha: float, a: float) -> float:
    """Equation (4)."""
    return b * math.exp(-lam * age) + alpha * a


def page_score(scores: list[float]) -> float:
    """Equation (5)."""
    total = 0.0
    for s in scores:
        total += float(s)
    return total / len(scores)


def evict(
    page_scores: dict[int, float], page_tokens: dict[int, int], kept: int, budget: int
) -> list[int]:
    """Lines 5 to 10 of Algorithm 1, over the non-pinned pages; returns them in order of eviction.

    A heap of (score, page) gives the smaller page number first when scores tie: the older page.
    """
    heap = [(s, p) for p, s in page_scores.items()]
    heapq.heapify(heap)
    evicted = []
    while kept > budget:
        _, page = heapq.heappop(heap)
        kept -= page_tokens[page]
        evicted.append(page)
    return evicted


@dataclass
class Token:
    region: int
    inserted_at: float
    a: float | None = None  # None until it is first observed
    observations: list[tuple[float, float]] = field(default_factory=list)
    tau: list[float] = field(default_factory=list)


@dataclass
class Episode:
    """A cache that is observed and evicted from: a dictionary of position -> token."""

    base_priority: list[float]
    decay_rate: list[float]
    pinned: list[bool]
    page_size: int
    budget: int
    rho: float
    alpha: float
    scale: float  # tau = scale / |K_t|
    init: str
    cache: dict[int, Token] = field(default_factory=dict)

    def append(self, position: int, region: int, step: float) -> None:
        self.cache[position] = Token(region, step)

    def observe(self, step: float, mass: dict[int, float]) -> None:
        tau = self.scale / len(self.cache)
        for position, token in self.cache.items():
            if token.a is None:
                token.a = (
                    mass[position]
                    if self.init == "first"
                    else importance(0.0, mass[position], self.rho)
                )
            else:
                token.a = importance(token.a, mass[position], self.rho)
            token.observations.append((step, mass[position]))
            token.tau.append(tau)

    def token_score(self, position: int, step: float) -> float:
        token = self.cache[position]
        age = step - refreshed_at(token.inserted_at, token.observations, token.tau)
        return score(
            self.base_priority[token.region],
            self.decay_rate[token.region],
            age,
            self.alpha,
            token.a or 0.0,
        )

    def evict(self, step: float) -> float:
        """Hold the budget; return the smallest gap between page scores that decided anything."""
        pages: dict[int, list[int]] = {}
        for position in self.cache:
            pages.setdefault(position // self.page_size, []).append(position)
        open_page = max(pages)
        scores = {
            page: page_score([self.token_score(i, step) for i in members])
            for page, members in pages.items()
            if page != open_page and not any(self.pinned[self.cache[i].region] for i in members)
        }
        sizes = {page: len(members) for page, members in pages.items()}
        gone = evict(scores, sizes, len(self.cache), self.budget)
        for page in gone:
            for position in pages[page]:
                del self.cache[position]
        stayed = [s for page, s in scores.items() if page not in gone]
        if not gone or not stayed:
            return math.inf
        return min(stayed) - max(scores[page] for page in gone)
