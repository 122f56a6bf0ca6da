"""What is known of every kept token of one sequence, and which page it belongs to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memdecay.engine.slots import Move
from memdecay.errors import BudgetError
from memdecay.policy import Policy, Tokens
from memdecay.policy.pages import (
    check_bounded,
    check_finite,
    check_score,
    leaving,
    page_scores,
    pages_of,
    plan_eviction,
)
from memdecay.regions import Profile

if TYPE_CHECKING:
    from memdecay.engine.surprisal import Trail


@dataclass(frozen=True)
class Labels:
    """What the orchestrator says of tokens to come.

    Args:
        region: (count,) int64, index into the profile.
        span: (count,) int64, the message part each token comes from, increasing with time.
        pinned: never evict them.
    """

    region: Tensor
    span: Tensor
    pinned: bool = False

    def split(self, count: int) -> tuple[Labels, Labels]:
        """Return the labels of the first `count` tokens, and the others."""
        return (
            Labels(self.region[:count], self.span[:count], self.pinned),
            Labels(self.region[count:], self.span[count:], self.pinned),
        )


_SCALARS = (
    "length",
    "seen",
    "num_pages",
    "latest_page",
    "next_page",
    "filled",
    "last_region",
    "latest_span",
    "num_queries",
)
"""What appending changes of a ledger beside the columns."""

_COLUMNS: Mapping[str, torch.dtype] = {
    "position": torch.int64,
    "region": torch.int64,
    "span": torch.int64,
    "page": torch.int64,
    "page_index": torch.int64,
    "inserted_at": torch.float32,
    "num_observed": torch.int32,
    "pinned": torch.bool,
}


_EVIDENCE: Mapping[str, tuple[str, torch.dtype]] = {
    "surprisal": ("surprisal", torch.float32),
    "replay": ("replayed", torch.bool),
}
"""What a policy needs -> the column that it gets for it."""


class _Late(Tokens):
    """Tokens whose surprisal is worked out when it is first read: at most steps nobody does."""

    ledger: Ledger

    @functools.cached_property
    def surprisal(self) -> Tensor:
        """See `Tokens`."""
        return self.ledger["surprisal"]


class Ledger:
    """The per-token columns of one sequence, aligned with its slots, and its pages.

    Args:
        policy: whose columns are kept too.
        profile: the region policies.
        capacity: slots.
        page_size: tokens a page.
        align: None, or "region" to open a fresh page wherever the region changes.
        window: queries that an observation at the end of a prompt averages over.
        device: where the columns live.
        trail: where the surprisal of the tokens comes from, if the policy needs it.
    """

    planner = staticmethod(plan_eviction)
    parts: int = 1
    """In how many parts a token may be kept: as many as layers times KV heads in a `HeadLedger`."""

    def __init__(
        self,
        policy: Policy,
        profile: Profile,
        *,
        capacity: int,
        page_size: int,
        align: str | None,
        window: int,
        device: torch.device,
        trail: Trail | None = None,
    ) -> None:
        self.policy = policy
        self.profile = profile
        self.page_size = page_size
        self.align = align
        self.window = window
        self.device = device
        self.length = 0
        self.seen = 0
        self.num_pages = 0
        self.latest_page = -1
        self.next_page = 0
        self.filled = 0
        self.last_region = -1
        self.latest_span = 0
        self.starts: list[tuple[int, int]] = []  # position and region, where pages are aligned
        self.columns = {
            name: torch.zeros(capacity, dtype=dtype, device=device)
            for name, dtype in _COLUMNS.items()
        }
        for name in policy.columns:
            self.columns[f"state.{name}"] = torch.zeros(capacity, device=device)
        for need, (name, dtype) in _EVIDENCE.items():
            if need in policy.needs:
                self.columns[name] = torch.zeros(capacity, dtype=dtype, device=device)
        self.trail = trail
        self.queries = torch.zeros(capacity, window, device=device)
        self.num_queries = 0

    def __getitem__(self, column: str) -> Tensor:
        """Return a column, (kv_len,), as a view."""
        if column == "surprisal":
            self.settle()
        return self.columns[column][: self.length]

    def tokens(self, now: float) -> Tokens:
        """Return what a policy sees; the tensors are views, not to be written to."""
        fields = self._fields(slice(0, self.length), now)
        if not self.waiting:
            return Tokens(**fields)
        late = _Late(**fields)
        del late.__dict__["surprisal"]
        late.__dict__["ledger"] = self
        return late

    def _fields(self, where: slice, now: float) -> dict[str, Any]:
        """Return the arguments of `Tokens` for some of the slots."""
        columns = self.columns
        evidence = {name: columns[name][where] for name, _ in _EVIDENCE.values() if name in columns}
        return {
            "position": columns["position"][where],
            "region": columns["region"][where],
            "span": columns["span"][where],
            "inserted_at": columns["inserted_at"][where],
            "num_observed": columns["num_observed"][where],
            "now": now,
            "seq_len": self.seen,
            "pinned": columns["pinned"][where],
            "page_size": self.page_size,
            "state": {name: columns[f"state.{name}"][where] for name in self.policy.columns},
            **evidence,
        }

    def put(self, changed: Mapping[str, Tensor], where: slice | None = None) -> None:
        """Take in columns that the policy returned, of all tokens or of those `where` (mutates)."""
        for name, column in changed.items():
            self.columns[f"state.{name}"][where or slice(0, self.length)] = column

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots (mutates)."""
        extra = capacity - self.queries.shape[0]
        if extra > 0:
            for name, column in self.columns.items():
                rest = (0, 0) * (column.ndim - 1)
                self.columns[name] = torch.nn.functional.pad(column, (*rest, 0, extra))
            self.queries = torch.nn.functional.pad(self.queries, (0, 0, 0, extra))

    # Pages: page = true position // page_size, or counted from the last region boundary.

    def pages_of(self, region: Tensor) -> tuple[Tensor, int, int, int]:
        """Return the pages that the next tokens would get: nothing changes.

        Args:
            region: (count,) int64, their regions; count is at least 1.

        Returns:
            (count,) int64 pages, which rise by steps of one, and then `next_page`, `filled` and
            `last_region` as they would be.
        """
        count = len(region)
        if self.align is None:
            last = self.seen + count - 1
            page = torch.arange(self.seen, self.seen + count, device=self.device) // self.page_size
            return page, last // self.page_size + 1, last % self.page_size + 1, -1
        pages = []
        next_page, filled, last_region = self.next_page, self.filled, self.last_region
        for value in region.tolist():
            if filled in (0, self.page_size) or value != last_region:
                next_page, filled, last_region = next_page + 1, 0, value
            filled += 1
            pages.append(next_page - 1)
        page = torch.tensor(pages, dtype=torch.int64, device=self.device)
        return page, next_page, filled, last_region

    @property
    def open_page(self) -> int | None:
        """Index of the page being filled, if it holds a kept token."""
        being_filled = self.filled % self.page_size and self.latest_page == self.next_page - 1
        return self.num_pages - 1 if self.num_pages and being_filled else None

    def stuck(self) -> tuple[int, int]:
        """Return how many kept tokens pins hold, and how many more the page being filled holds."""
        stuck, sizes, page = self.held(), self.sizes(), self.open_page
        held = self._in_tokens(sizes[stuck])
        if page is not None:
            stuck = stuck | (self["page_index"] == page)
        return held, self._in_tokens(sizes[stuck]) - held

    def over(self, budget: int, new: int = 0) -> int:
        """Return the parts that `plan` must free for `new` more tokens; at most 0 if none."""
        return self.size + (new - budget) * self.parts

    @property
    def size(self) -> int:
        """All that is kept, in parts of a token."""
        return self.length

    def sizes(self) -> Tensor:
        """Return (kv_len,) int64, what each kept token takes, in parts of a token."""
        return torch.ones(self.length, dtype=torch.int64, device=self.device)

    def _in_tokens(self, sizes: Tensor) -> int:
        """Return the tokens that these parts make up, rounded up."""
        return -(-int(sizes.sum()) // self.parts)

    def kept_by_region(self) -> list[int]:
        """Return for each region of the profile how many tokens are kept; the sum is exact."""
        parts = torch.zeros(len(self.profile.names), dtype=torch.int64, device=self.device)
        parts.index_add_(0, self["region"], self.sizes())
        ends = [0, *(-(-end // self.parts) for end in parts.cumsum(0).tolist())]
        return [end - start for start, end in itertools.pairwise(ends)]

    # Changes

    def append(self, labels: Labels, now: float, inserted_at: Tensor | float) -> None:
        """Enter the next tokens, in the slots after the last one (mutates).

        Args:
            labels: of the new tokens.
            now: clock reading.
            inserted_at: clock reading at arrival, one or `(count,)`.
        """
        count = len(labels.region)
        if count == 0:
            return
        fresh = slice(self.length, self.length + count)
        page, next_page, filled, last_region = self.pages_of(labels.region)
        spread = next_page - 1 - int(page[0]) if count > 1 else 0
        opened = int(next_page - 1 - spread != self.latest_page or not self.num_pages)
        columns = self.columns
        columns["position"][fresh] = torch.arange(self.seen, self.seen + count, device=self.device)
        columns["region"][fresh] = labels.region
        columns["span"][fresh] = labels.span
        columns["page"][fresh] = page
        columns["page_index"][fresh] = page - page[0] + (self.num_pages - 1 + opened)
        columns["inserted_at"][fresh] = inserted_at
        columns["num_observed"][fresh] = 0
        columns["pinned"][fresh] = labels.pinned
        for name, value in self.policy.columns.items():
            columns[f"state.{name}"][fresh] = value
        for name, _ in _EVIDENCE.values():
            if name in columns:
                columns[name][fresh] = 0
        self.queries[fresh] = 0
        self.length += count
        self.num_pages += opened + spread
        self.seen += count
        self.latest_page = next_page - 1
        self.latest_span = int(labels.span[-1])
        if self.align is not None:
            for offset, number in enumerate(page.tolist()):
                if number == len(self.starts):
                    self.starts.append((self.seen - count + offset, int(labels.region[offset])))
        self.next_page, self.filled, self.last_region = next_page, filled, last_region
        if self.policy.columns or self.policy.head_columns:
            self.put(self.policy.on_insert(Tokens(**self._fields(fresh, now))), fresh)

    def mark(self) -> dict[str, Any]:
        """Return what `back_to` needs to take back later appends."""
        return {name: getattr(self, name) for name in _SCALARS}

    def back_to(self, mark: dict[str, Any]) -> None:
        """Take back all that was appended since `mark`, if nothing was moved since (mutates)."""
        self.__dict__.update(mark)
        del self.starts[self.next_page :]
        self._rewind_trail()

    def move(self, move: Move) -> None:
        """Repeat what a slot table did to its row (mutates)."""
        for column in (*self.columns.values(), self.queries):
            if move.order is not None:
                column[: move.length] = column[move.order]
            elif move.holes is not None and move.movers is not None:
                column.index_copy_(0, move.holes, column.index_select(0, move.movers))
        self.length = move.length
        index = self["page_index"]
        kept = torch.zeros(self.num_pages, dtype=torch.bool, device=self.device)
        kept[index] = True
        renumbered = kept.cumsum(0) - 1
        index.copy_(renumbered[index])
        self.num_pages = int(kept.sum())
        self.latest_page = int(self["page"].max()) if self.length else -1

    def put_back(self, columns: Mapping[str, Tensor]) -> None:
        """Enter tokens that were kept before, in the slots after the last one (mutates).

        Args:
            columns: all of them, `(n,)` each; the pages are numbered anew.
        """
        fresh = slice(self.length, self.length + len(columns["position"]))
        for name, column in columns.items():
            self.columns[name][fresh] = column
        self.queries[fresh] = 0
        self.length = fresh.stop
        pages, page_index = self["page"].unique(return_inverse=True)
        self["page_index"].copy_(page_index)
        self.num_pages, self.latest_page = len(pages), int(pages[-1])

    def rewind(self, count: int) -> None:
        """Forget that the last `count` tokens were seen; their slots are already gone (mutates).

        Whether a token is still kept or was evicted before makes no difference.

        Args:
            count: tokens of this sequence, padding not counted.
        """
        self.seen -= count
        self._rewind_trail()
        self.num_queries = max(0, self.num_queries - count)
        self.latest_span = int(self["span"].max()) if self.length else 0
        if self.align is None:
            self.next_page = -(-self.seen // self.page_size)
            self.filled = (self.seen - 1) % self.page_size + 1 if self.seen else 0
            return
        while self.starts and self.starts[-1][0] >= self.seen:
            self.starts.pop()
        start, self.last_region = self.starts[-1] if self.starts else (self.seen, -1)
        self.next_page, self.filled = len(self.starts), self.seen - start

    # Surprisal and replay

    def read(self, hidden: Tensor, ids: Tensor | None) -> None:
        """Take in the last hidden states of the newest tokens, for their surprisal (mutates).

        Args:
            hidden: (count, hidden_size).
            ids: (count,) int64, None if the tokens were given as embeddings.
        """
        assert self.trail is not None
        self.trail = self.trail.add(self.seen - len(hidden), hidden, ids)

    def settle(self) -> None:
        """Work out the surprisal of the tokens that wait for it (mutates)."""
        if self.trail is None:
            return
        found = self.trail.work_out()
        if found is not None:
            first, surprisal = found
            offset = self["position"] - first
            mine = (offset >= 0) & (offset < len(surprisal))
            self.columns["surprisal"][: self.length][mine] = surprisal[offset[mine]]
        self.trail = self.trail.worked_out()

    @property
    def waiting(self) -> int:
        """Tokens whose surprisal is not worked out yet."""
        return self.trail.waiting if self.trail is not None else 0

    def trim(self) -> None:
        """Free the hidden states that nobody will ask for (mutates)."""
        assert self.trail is not None
        self.trail = self.trail.trimmed()

    def _rewind_trail(self) -> None:
        if self.trail is not None:
            self.trail = self.trail.rewind(self.seen)

    def replayed(self, slots: Tensor, attention: Tensor, now: float) -> None:
        """Let the policy learn from tokens that were repeated (mutates).

        Args:
            slots: (count,) int64, where they are.
            attention: (num_layers, num_heads, kv_len) float32, see `Policy.on_replay`.
            now: clock reading.
        """
        self.put(self.policy.on_replay(self.tokens(now), attention, self.profile))
        self.columns["replayed"][slots] = True

    # Attention

    def observe_heads(self, peak: Tensor, now: float) -> None:
        """Let the policy learn what the watched heads gave most attention to (mutates).

        Args:
            peak: (number of heads, kv_len) float32, see `Policy.observe_heads`.
            now: clock reading.
        """
        self.put(self.policy.observe_heads(self.tokens(now), peak, self.profile))

    def observe(self, attention_mass: Tensor, now: float) -> Tensor:
        """Let the policy learn from one observation (mutates).

        Args:
            attention_mass: (kv_len,) float32, share of one query's attention averaged over heads,
                layers and the query window.
            now: clock reading.

        Returns:
            (kv_len,) bool, tokens whose decay clock this observation reset, if the policy has one.
        """
        before = self.columns.get("state.refreshed_at")
        old = before[: self.length].clone() if before is not None else None
        changed = self.policy.observe(self.tokens(now), attention_mass, self.profile)
        self.put(changed)
        self["num_observed"].add_(1)
        if old is None:
            return torch.zeros(self.length, dtype=torch.bool, device=self.device)
        return self["state.refreshed_at"] != old

    def hold_queries(self, masses: Tensor) -> None:
        """Keep what the last queries of a prompt attended to, until the prompt ends (mutates).

        A prompt may arrive in chunks; only its last `window` queries count, however it was cut.

        Args:
            masses: (kv_len, queries) float32, one column a query, oldest first.
        """
        new = masses.shape[1]
        if new < self.window:
            keep = min(self.num_queries, self.window - new)
            self.queries[:, :keep] = self.queries[
                :, self.num_queries - keep : self.num_queries
            ].clone()
            self.queries[: self.length, keep : keep + new] = masses
            self.num_queries = keep + new
        else:
            self.queries[: self.length] = masses[:, -self.window :]
            self.num_queries = self.window

    def release_queries(self) -> Tensor:
        """Return the (kv_len,) mass averaged over the held queries, and hold none (mutates)."""
        mass = self.queries[: self.length, : self.num_queries].mean(1)
        self.num_queries = 0
        return mass

    # Eviction

    def plan(self, excess: int, now: float) -> Tensor:
        """Return (kv_len,) bool, the tokens to evict to free `excess`; nothing changes.

        In a `HeadLedger` it is `(num_layers, num_kv_heads, kv_len)`, and entries.

        Raises:
            BudgetError: the pins leave too little to evict.
        """
        return type(self).planner(
            self.tokens(now),
            self.policy,
            self.profile,
            page_index=self["page_index"],
            num_pages=self.num_pages,
            pinned=self["pinned"],
            excess=excess,
            open_page=self.open_page,
        )

    def plan_down(
        self,
        need: int,
        wanted: int,
        now: float,
        *,
        full: Tensor,
        stays: Tensor,
        span: int,
        room: int | None = None,
    ) -> Tensor:
        """Return (kv_len,) bool, the tokens to keep at fewer bits from now on; nothing changes.

        Neighbours go down together, as keys that are turned alike lie closer to each other: of what
        is at full precision and may go, `span` neighbours are a page, and the pages with the lowest
        score go first, the last of them in part.

        Args:
            need: tokens that must go down.
            wanted: tokens that may as well, if the policy protects none of them.
            now: clock reading.
            full: (kv_len,) bool, tokens at full precision.
            stays: (kv_len,) bool, tokens whose pages stay as they are.
            span: neighbours that go together.
            room: tokens beside pinned ones that this leaves at full precision; what it leaves of
                `full` if None.

        Raises:
            BudgetError: too few may go down.
            PolicyError: as `plan`.
        """
        policy, tokens, index = self.policy, self.tokens(now), self["page_index"]
        check_bounded(policy)
        score = check_score(policy, policy.score(tokens, self.profile), tokens.position.shape)
        check_finite(policy, score)
        free = full & ~pages_of(stays, index, self.num_pages)[index]
        left = int(full.sum()) - need if room is None else room
        preferred = policy.protected(leaving(tokens, left), self.profile)
        if preferred is None:
            preferred = torch.zeros_like(free)
        first = free & ~preferred
        spare = int(first.sum())
        if spare >= need:
            return self._worst(score, first, min(wanted, spare), span)
        return first | self._worst(score, free & preferred, need - spare, span)

    def _worst(self, score: Tensor, free: Tensor, count: int, span: int) -> Tensor:
        """Return (kv_len,) bool, so many of the tokens `free`, worst neighbours first.

        Raises:
            BudgetError: there are fewer.
        """
        chosen = torch.zeros_like(free)
        if count <= 0:
            return chosen
        slots = free.nonzero().flatten()
        slots = slots[self["position"][slots].argsort()]
        if len(slots) < count:
            raise BudgetError(f"{count} tokens must go down to fewer bits, but {len(slots)} may.")
        pages, index = (self["position"][slots] // span).unique(return_inverse=True)
        worth = page_scores(score[slots], index, len(pages))
        order = worth[index].sort(stable=True).indices
        chosen[slots[order[:count]]] = True
        return chosen

    def page_score(self, now: float) -> Tensor:
        """Return (num_pages,) float64, the mean score of each page, equation (5)."""
        score = self.policy.score(self.tokens(now), self.profile)
        return page_scores(score, self["page_index"], self.num_pages)

    def spare(self, now: float) -> int:
        """Return how many tokens are in pages that nothing keeps: no pin, no preference."""
        stays = self.held()
        tokens = leaving(self.tokens(now), self.length - int(stays.sum()))
        preferred = self.policy.protected(tokens, self.profile)
        if preferred is not None:
            stays = stays | preferred
        if self.page_size == 1:  # none is being filled
            return self.length - int(stays.sum())
        pages = torch.zeros(self.num_pages, dtype=torch.bool, device=self.device)
        pages[self["page_index"][stays]] = True
        if self.open_page is not None:
            pages[self.open_page] = True
        return int((~pages[self["page_index"]]).sum())

    def held(self) -> Tensor:
        """Return (kv_len,) bool, the tokens that a pin keeps, alone or through their page."""
        held = self["pinned"]
        if "labels" in self.policy.needs:
            held = held | self.profile.tensors(self.device)[2].index_select(0, self["region"])
        if self.page_size == 1:
            return held
        pages = torch.zeros(self.num_pages, dtype=torch.bool, device=self.device)
        pages[self["page_index"][held]] = True
        return pages[self["page_index"]]

    def held_with(self, region: Tensor, pinned: Tensor) -> tuple[int, int]:
        """Return (pinned, held) token counts once more tokens are in: nothing changes.

        `held` counts the kept and the new tokens of every page with a pinned token, as such a
        page stays whole.

        Args:
            region: (count,) int64, of the tokens to come; count is at least 1.
            pinned: (count,) bool, of the tokens to come.
        """
        pinned_region = torch.zeros(len(self.profile.names), dtype=torch.bool, device=self.device)
        if "labels" in self.policy.needs:
            pinned_region = self.profile.tensors(self.device)[2]
        region, pinned = region.to(self.device), pinned.to(self.device)
        page = torch.cat([self["page"], self.pages_of(region)[0]])
        held = torch.cat(
            [self["pinned"] | pinned_region[self["region"]], pinned | pinned_region[region]]
        )
        new = torch.full_like(region, self.parts)
        sizes = torch.cat([self.sizes(), new])
        return self._in_tokens(sizes[held]), self._in_tokens(sizes[torch.isin(page, page[held])])

    def copy(self) -> Ledger:
        """An independent copy."""
        other: Ledger = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.columns = {name: column.clone() for name, column in self.columns.items()}
        other.queries = self.queries.clone()
        other.starts = [*self.starts]
        return other
