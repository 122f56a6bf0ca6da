"""The cache that a transformers model writes to: a fixed budget, evicted by a policy."""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from memdecay.engine.attach import AttachedCache, Attachment, attach
from memdecay.engine.forward import Forward
from memdecay.engine.graded import BITS, GROUP
from memdecay.engine.interrupts import HeldInterrupts, uninterrupted
from memdecay.engine.known import with_known
from memdecay.engine.ledger import Labels, Ledger
from memdecay.engine.moving import Moved, check_back, check_taken, copy_out, movable, put_in
from memdecay.engine.replay import LEAST, PIECE, ReplayForward, token_equivalents
from memdecay.engine.slots import KVPool, Move, SlotTable
from memdecay.engine.support import Layout, check_supported
from memdecay.engine.surprisal import HELD, Head, Trail
from memdecay.engine.watch import Watch, check_heads
from memdecay.errors import BudgetError, MemDecayError, ModelError, ProfileError, SessionError
from memdecay.policy import DEFAULT_POLICY, Policy, get_policy
from memdecay.regions import Profile

if TYPE_CHECKING:
    from memdecay.engine.head_cache import HeadCache

_FIRST_CAPACITY = 256
_MOST_AT_ONCE = 8192
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Kind = TypeVar("_Kind", bound="MemDecayCache")


def _lasting(method: _Method) -> _Method:
    """Let what a method allocates outlive `torch.inference_mode` and stay out of autograd."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


@dataclass(frozen=True)
class Evicted:
    """What one eviction took from a row: positions `(n,)` int64, and their pages and regions."""

    row: int
    position: Tensor
    page: Tensor
    region: Tensor


@dataclass(frozen=True)
class _Mark:
    """What a forward that fails puts back."""

    lengths: list[list[int]]
    ledgers: list[dict[str, Any]]
    labels: list[list[Labels]]
    padding: list[int]


class PoolLayer(CacheLayerMixin):
    """The view that transformers has of one layer; all state is the cache's."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: MemDecayCache, layer: int, window: int | None) -> None:
        self._cache = weakref.ref(cache)
        self._layer = layer
        self.is_sliding = window is not None
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def cache(self) -> MemDecayCache:
        """The cache that this layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise SessionError("This cache layer outlived its MemDecayCache; keep the cache alive.")
        return cache

    @property
    def is_initialized(self) -> bool:
        """Whether the pool exists."""
        return bool(self.cache.pools)

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """Ignore what the base class writes."""

    @property
    def keys(self) -> Tensor | None:
        """`(batch, num_kv_heads, kv_len, head_dim)`, in slot order."""
        cache = self.cache
        if not cache.pools:
            return None
        keys = cache.pools[self._layer].keys(cache.table_of(self._layer).width)
        return keys.clone() if cache.coded_tokens else keys

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._refuse(value)

    @property
    def values(self) -> Tensor | None:
        """Like `keys`."""
        cache = self.cache
        if not cache.pools:
            return None
        values = cache.pools[self._layer].values(cache.table_of(self._layer).width)
        return values.clone() if cache.coded_tokens else values

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._refuse(value)

    @staticmethod
    def _refuse(value: Tensor | None) -> None:
        if value is not None:
            raise MemDecayError(
                "A MemDecayCache holds its keys and values in its own pool; they cannot be "
                "assigned, offloaded or quantized from outside."
            )

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return self.cache.rows or -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache makes its pools in `update`."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return all that are kept."""
        return self.cache.update(key_states, value_states, self._layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (kv_len, offset) such that the new tokens have their true indices."""
        return self.cache.mask_sizes(query_length, self._layer)

    def get_seq_length(self) -> int:
        """Return the tokens seen, not the tokens kept."""
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: any number of tokens may be seen."""
        return -1

    def reset(self) -> None:
        """Nothing to do: the cache resets itself."""


class MemDecayCache(AttachedCache):
    """A KV cache under a fixed budget, for `model.generate(..., cache=cache)`.

    At most `budget` tokens are kept at every moment, inside a prompt too: room is made before a
    forward. A forward that cannot fit is refused; give `generate` a `prefill_chunk_size`, or use
    `Session`, which cuts prompts itself. Kept tokens keep their true positions.

    Not for training: what is stored is detached. One cache serves one thread at a time; several
    caches may serve one model, in several threads.

    Two flags say what the next forwards are, for whoever runs them: `prefilling`, parts of a
    prompt, also those of one token; `stepping`, that a forward of several tokens stands for as many
    decode steps (their observation is one, of its last queries, and comes after them).

    Whoever keeps what is evicted elsewhere sets `on_forget`: it is called with the row and the
    tokens before the budget evicts them; and `on_rollback`, called with how many tokens of the
    sequence are left. `on_lower` is called with tokens at full precision before they become codes,
    in a cache with `full_precision`. Where all layers slide, what leaves the window is not given
    away. Whoever exchanges tokens between decode steps sets `on_step`: it is called with how many
    tokens are to come, before room is made for them.

    `recall_heads` are the (layer, query head) by which what was evicted can be found again, from
    the profile or known for the model: those of `recall`, or else those of evidence, which find
    less; () if there are none.

    Args:
        model: the model that will use it. Nothing on it changes between forwards.
        budget: tokens to keep for each sequence of the batch; None for no limit.
        policy: a name, or a policy.
        profile: region policies, the defaults if None. For a policy that goes by evidence heads
            one that says nothing of them gets those that are known for the model, if any.
        page_size: tokens a page, only whole pages are evicted; what the policy prefers if None.
        align: "region" to open a fresh page at every region boundary.
        clock: "steps" (decode steps, as in the paper) or "tokens" (every token is a step).
        observe_every: k, observe attention every k decode steps; 0 for never.
        window: queries that an observation at the end of a prompt averages over.
        default_region: region of tokens that nobody labelled, such as generated ones.
        surprisal_vocabulary: for a policy that needs surprisal: ids that the likelihood of a token
            is normalised over, the lowest ones and the token itself; None for all, which is exact
            and, where the vocabulary is large, slow.
        full_precision: of the tokens kept, so many at most are at full precision; the others are
            still attended to, at `bits` bits (`GradedCache`). None for all of them.
        bits: 4 or 8.
        group_size: neighbours that go down together, if they may: their keys share a scale a
            channel. Groups have from half of that to one and a half times as many.
        full_regions: names of regions whose tokens never go down; those that the profile pins if
            None. If there is no room for them at full precision, they are evicted.

    Raises:
        BudgetError, PolicyError, ProfileError, ModelError: an argument is not usable.
    """

    by_head: ClassVar[bool] = False
    """Whether each KV head of each layer keeps its own tokens; then this is a `HeadCache`."""
    forward_type: ClassVar[type[Forward]] = Forward

    def __new__(
        cls,
        *args: Any,
        policy: Any = DEFAULT_POLICY,
        full_precision: Any = None,
        **kwargs: Any,
    ) -> MemDecayCache:
        """Return a `HeadCache` or a `GradedCache` if that is what the arguments ask for."""
        policy = get_policy(policy) if isinstance(policy, str) else policy
        if cls is MemDecayCache and getattr(policy, "per_head", False):
            from memdecay.engine.head_cache import HeadCache

            return super().__new__(HeadCache)
        if cls is MemDecayCache and full_precision is not None:
            from memdecay.engine.graded_cache import GradedCache

            return super().__new__(GradedCache)
        return super().__new__(cls)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        budget: int | None,
        policy: Policy | str = DEFAULT_POLICY,
        profile: Profile | None = None,
        page_size: int | None = None,
        align: str | None = None,
        clock: str = "steps",
        observe_every: int = 1,
        window: int = 16,
        default_region: str = "scratchpad",
        surprisal_vocabulary: int | None = 8192,
        full_precision: int | None = None,
        bits: int = 4,
        group_size: int = GROUP,
        full_regions: Sequence[str] | None = None,
    ) -> None:
        self.layout: Layout = check_supported(model)
        self.policy = get_policy(policy) if isinstance(policy, str) else policy
        if not isinstance(self.policy, Policy):
            raise MemDecayError(f"policy is {policy!r}, but it must be a policy or its name.")
        self.profile = Profile.default() if profile is None else profile
        if not isinstance(self.profile, Profile):
            raise MemDecayError(f"profile is {profile!r}, but it must be a Profile or None.")
        _check_choice("align", align, (None, "region"))
        _check_choice("clock", clock, ("steps", "tokens"))
        if page_size is None:
            page_size = self.policy.page_size
        _check_integer("page_size", page_size, 1)
        _check_integer("observe_every", observe_every, 0)
        _check_integer("window", window, 1)
        if budget is not None:
            _check_integer("budget", budget, 1, BudgetError)
            if budget < page_size:
                raise BudgetError(
                    f"budget is {budget} tokens, but it must hold at least one page of "
                    f"{page_size} tokens."
                )
            if not self.policy.bounded:
                raise BudgetError(
                    f"budget is {budget}, but policy {self.policy.name!r} never evicts; its "
                    f"budget must be None."
                )
        self.budget = budget
        self.page_size = page_size
        self.align = align
        self.clock = clock
        self.observe_every = observe_every
        self.window = window
        self.default_region = self.profile.id(default_region)
        if surprisal_vocabulary is not None:
            _check_integer("surprisal_vocabulary", surprisal_vocabulary, 1)
        self.surprisal_vocabulary = surprisal_vocabulary
        wanted = "surprisal" in self.policy.needs
        self._head = Head(model, surprisal_vocabulary) if wanted else None
        self.full_precision = full_precision
        self.bits = bits
        self.group_size = group_size
        self.full_regions = self._check_grades(full_regions)
        if "heads" in self.policy.needs:
            self.profile = with_known(self.profile, model.config)
            sets = self.profile.evidence.values()
            check_heads(((one.layer, one.head) for heads in sets for one in heads), self.layout)
        watched = self.policy.heads(self.profile) if "heads" in self.policy.needs else ()
        known = with_known(self.profile, model.config).evidence
        found = known.get("recall") or known.get("read") or known.get("replay") or ()
        check_heads(((one.layer, one.head) for one in found), self.layout)
        self.recall_heads = tuple((one.layer, one.head) for one in found)
        self.watch = Watch(watched, self.layout)
        self.attachment: Attachment = attach(model)
        self.on_evict: Callable[[Evicted], None] | None = None
        self.on_observe: Callable[[int, Tensor, Tensor], None] | None = None
        self.on_heads: Callable[[int, Tensor], None] | None = None
        self.on_forget: Callable[[int, Moved], None] | None = None
        self.on_lower: Callable[[Moved], None] | None = None
        self.on_rollback: Callable[[int], None] | None = None
        self.on_queries: Callable[[int, Tensor], None] | None = None
        self.on_step: Callable[[int], None] | None = None
        self.listened = Watch((), self.layout)
        self._clear()
        super().__init__(
            layers=[
                PoolLayer(self, layer, window) for layer, window in enumerate(self.layout.windows)
            ]
        )

    def _check_grades(self, full_regions: Sequence[str] | None) -> tuple[int, ...]:
        """Return the regions that stay at full precision, if the settings of that are usable."""
        _check_choice("bits", self.bits, BITS)
        _check_integer("group_size", self.group_size, 1)
        if full_regions is None:
            pinned = self.profile.pinned
            regions = tuple(number for number, one in enumerate(pinned) if one)
        elif isinstance(full_regions, str):
            raise ProfileError(
                f"full_regions is {full_regions!r}, but it must be a sequence of names of regions."
            )
        else:
            try:
                regions = tuple(self.profile.id(name) for name in full_regions)
            except ProfileError as error:
                raise ProfileError(f"full_regions is {[*full_regions]}: {error}") from None
        if self.full_precision is None:
            return regions
        _check_integer("full_precision", self.full_precision, 1, BudgetError)
        if self.by_head:
            raise MemDecayError(
                f"full_precision is {self.full_precision}, but policy {self.policy.name!r} lets "
                f"heads keep their own tokens, so it must be None."
            )
        if not self.policy.bounded:
            raise BudgetError(
                f"full_precision is {self.full_precision}, but policy {self.policy.name!r} has no "
                f"order in which tokens could go down, so it must be None."
            )
        least = self.page_size + self.group_size
        if self.full_precision < least:
            raise BudgetError(
                f"full_precision is {self.full_precision} tokens, but it must be at least {least}: "
                f"a page of {self.page_size}, and a group of {self.group_size} to go down."
            )
        if self.budget is not None and self.full_precision > self.budget:
            raise BudgetError(
                f"full_precision is {self.full_precision} tokens, but it must be at most the "
                f"budget, which is {self.budget}."
            )
        return regions

    def _clear(self) -> None:
        self.rows = 0
        self.seen = 0
        self.steps = 0
        self.observations = 0
        self.evicted_tokens = 0
        self.evicted_pages = 0
        self.peak_tokens = 0
        self.prefilling = False
        self.stepping = False
        self.tables: list[SlotTable] = []
        self.pools: list[KVPool] = []
        self.ledgers: list[Ledger] = []
        self._labels: list[list[Labels]] = []
        self._slabs: dict[int | None, Tensor] = {}
        self._zero: Tensor | None = None
        self._running: Forward | ReplayForward | None = None
        self._repeating: ReplayForward | None = None
        self._padding: list[list[int]] = []
        self._rollback_point: _Mark | None = None
        self._last_count = 0
        self._prompt_is_next = False

    # What transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen, not kept; within a forward, those before it."""
        return self.seen if self._running is None else self._running.first_index

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (kv_len, offset) of a forward such that new tokens get their true indices."""
        return self.mask_sizes(query_length, layer_idx)

    def mask_sizes(self, query_length: int, layer: int) -> tuple[int, int]:
        """The same, noting which layer's mask is made next."""
        forward = self._running
        if forward is not None:
            forward.mask_layer = layer
            if isinstance(forward, ReplayForward):
                width = self.table_of(layer).width
                return width + query_length, forward.first_index - width
            return self.table_of(layer).width, forward.first_index - (
                self.table_of(layer).width - query_length
            )
        width = self.table_of(layer).width if self.tables else 0
        return width + query_length, self.seen - width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, and return all that it keeps, in slot order.

        Args:
            key_states: `(batch, num_kv_heads, count, head_dim)`.
            value_states: like `key_states`.
            layer_idx: the layer.
            args: ignored.
            kwargs: ignored.

        Returns:
            Keys and values, each `(batch, num_kv_heads, kv_len, head_dim)`, views of the pool.

        Raises:
            SessionError: outside a forward of the model that this cache was made for.
        """
        pool = self._store(key_states, value_states, layer_idx)
        if pool is None:
            return key_states, value_states
        width = self.table_of(layer_idx).width
        return pool.keys(width), pool.values(width)

    def _store(self, keys: Tensor, values: Tensor, layer: int) -> KVPool | None:
        """Store a layer's new keys and values; None in a replay, of which nothing is stored."""
        forward = self._running
        if forward is None:
            raise SessionError(
                "A MemDecayCache is filled only by a forward of the model it was made for."
            )
        if isinstance(forward, ReplayForward):
            forward.layer = layer
            return None
        if layer == len(self.pools):
            self._make_pool(keys, values, layer)
        forward.layer = layer
        pool = self.pools[layer]
        pool.write(forward.writes[self.table_of(layer).window], keys, values)
        return pool

    def reset(self) -> None:
        """Forget everything; the pools are freed."""
        self._clear()
        self.rolled_back()

    def rolled_back(self) -> None:
        """Tell who keeps tokens outside that those from `seen` on are not of the sequence."""
        if self.on_rollback is not None:
            self.on_rollback(self.seen)

    @_lasting
    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens seen, by their true positions: a rollback.

        What was evicted stays evicted. After a forward of several tokens that is not a prompt
        this ends one speculative decode step, so the clock moves on by one step.

        Args:
            tokens_to_remove: minus the number of tokens to forget, padding included.

        Raises:
            MemDecayError: the argument is positive, larger than what was seen, or goes back to
                where tokens that have left a sliding window would be seen again.
        """
        count = -tokens_to_remove
        if not 0 <= count <= self.seen:
            raise MemDecayError(
                f"tokens_to_remove is {tokens_to_remove}, but it must be between {-self.seen} and "
                f"0."
            )
        floor = max((table.floor for table in self.tables), default=0)
        if count and self.seen - count < floor:
            raise MemDecayError(
                f"tokens_to_remove is {tokens_to_remove}, but the sliding layers can go back only "
                f"to token {floor} of {self.seen}."
            )
        if count:
            self._rollback(count)
        if self._last_count > 1 and not self.prefilling:
            self._release_queries()
            self.steps += not self._prompt_is_next
        self._prompt_is_next = False
        self._last_count = 0

    def activate_past_recording(self) -> None:
        """Note that assisted decoding begins: its first forward is a prompt, not a decode step."""
        self._prompt_is_next = True

    @_lasting
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was, with its own keep set (beam search)."""
        self._select_rows(beam_idx)

    @_lasting
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, each repetition right after its row."""
        if self.rows:
            self._select_rows(torch.arange(self.rows).repeat_interleave(repeats))

    @_lasting
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, given as indices or as a bool mask."""
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select_rows(rows)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse: the pool does not move.

        Raises:
            MemDecayError: always.
        """
        PoolLayer._refuse(torch.empty(0))

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse: the pool does not move.

        Raises:
            MemDecayError: always.
        """
        PoolLayer._refuse(torch.empty(0))

    # What orchestrators say

    def label(
        self,
        regions: Sequence[str],
        *,
        spans: Sequence[int] | None = None,
        pinned: bool = False,
        row: int = 0,
    ) -> None:
        """Say which regions the next tokens of a row belong to, before they are run.

        Args:
            regions: one name a token, padding not counted.
            spans: for each token the message part it comes from, increasing with time.
            pinned: never evict these tokens.
            row: which sequence of the batch. Beam search makes `num_beams` rows of each before
                it runs the prompt, so label all of them.

        Raises:
            ProfileError: a name is unknown.
            MemDecayError: `spans` has another length, or there is no such row.
        """
        ids = {name: self.profile.id(name) for name in dict.fromkeys(regions)}
        region = torch.tensor([ids[name] for name in regions], dtype=torch.int64)
        span = torch.zeros(len(regions), dtype=torch.int64)
        if spans is not None:
            span = torch.tensor(spans, dtype=torch.int64)
        if len(span) != len(region):
            raise MemDecayError(
                f"spans has {len(span)} entries, but it must have one for each of the "
                f"{len(region)} tokens in regions."
            )
        _check_integer("row", row, 0)
        if self.rows:
            self._ledger(row)
        while len(self._labels) <= row:
            self._labels.append([])
        self._labels[row].append(Labels(region, span, pinned))

    def forget_labels(self) -> None:
        """Drop the labels of tokens that have not been run."""
        self._labels = []

    def pin(self, chosen: Callable[[Ledger], Tensor], pinned: bool = True, row: int = 0) -> int:
        """Pin or release kept tokens of a row; returns how many `chosen` picked."""
        ledger = self._ledger(row)
        mask = chosen(ledger)
        ledger["pinned"][mask] = pinned
        return int(mask.sum())

    # What is in it

    @property
    def now(self) -> float:
        """The clock of row 0: decode steps, or tokens seen."""
        return self.clock_of(self.ledgers[0]) if self.ledgers else 0.0

    def clock_of(self, ledger: Ledger) -> float:
        """The clock of a row: decode steps, or the tokens seen of it, without padding."""
        return float(self.steps if self.clock == "steps" else ledger.seen)

    @property
    def main(self) -> SlotTable:
        """The table that the ledgers are aligned with: full attention if any layer has it."""
        return self.tables[0]

    def _ledger(self, row: int) -> Ledger:
        if not 0 <= row < self.rows:
            raise MemDecayError(f"row is {row}, but this cache holds {self.rows} sequences.")
        return self.ledgers[row]

    def table_of(self, layer: int) -> SlotTable:
        """The slot table of a layer."""
        return self.tables[self.layout.table[layer]]

    def rank_of(self, layer: int) -> int:
        """The number of earlier layers with the same table."""
        return self.layout.rank[layer]

    def kept(self, row: int = 0) -> int:
        """Tokens kept of a sequence."""
        return self.main.lengths[row] if self.tables else 0

    def kept_entries(self, row: int = 0) -> int:
        """Entries kept of a sequence: one is a token in one KV head of one layer."""
        lengths = [self.tables[number].lengths[row] for number in self.layout.table if self.tables]
        return sum(lengths) * self.layout.num_kv_heads

    @property
    def coded_tokens(self) -> int:
        """Kept tokens that are not at full precision."""
        return 0

    def full_room(self) -> int | None:
        """Return the most tokens that one forward may have now, as far as precision limits it.

        So many can be at full precision beside what must be; None if all are. The budget may allow
        fewer.
        """
        return None

    def back_room(self) -> int | None:
        """Return the most tokens that may come back at once, as far as precision limits it."""
        return None

    def spare_full(self, count: int) -> None:
        """Make room at full precision for so many more tokens, where not all have it anyway."""

    def lower(self, positions: Tensor) -> None:
        """Let tokens go down to fewer bits, where there are such."""

    def drop_codes(self, positions: Tensor) -> None:
        """Evict tokens that are codes, where there are such."""

    @property
    def bits_an_element(self) -> float | None:
        """Bits that a number takes of what is not at full precision; None if all is."""
        return None

    @property
    def nbytes_by_precision(self) -> dict[str, int]:
        """The parts of `nbytes`, by what they hold."""
        return {"full": self.nbytes}

    @property
    def nbytes(self) -> int:
        """Bytes of the pools: what the KV holds of memory, used or not."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def peak_nbytes(self) -> int:
        """Bytes of keys and values in use when most tokens were kept, without free slots."""
        return sum(
            pool.nbytes * min(self.peak_tokens, table.capacity) // table.capacity
            for pool, table in ((pool, self.table_of(n)) for n, pool in enumerate(self.pools))
        )

    # A forward

    def only_new(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a forward without the tokens that were seen.

        Assisted decoding in transformers gives the whole sequence to its first forward, whatever
        the cache holds of it already.
        """
        positions = inputs.get("position_ids")
        if not (self._prompt_is_next and self.seen) or positions is None:
            return inputs
        count = positions.shape[-1]
        if count <= self.seen or int(positions.max()) != count - 1:
            return inputs
        names = ("input_ids", "inputs_embeds", "position_ids")
        new = {name: inputs[name][:, self.seen :] for name in names if inputs.get(name) is not None}
        return {**inputs, **new}

    @_lasting
    def begin(
        self,
        rows: int,
        count: int,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
    ) -> Forward | ReplayForward:
        """Make room for a forward and enter its tokens; called before the model's first layer.

        Args:
            rows: sequences of the batch.
            count: tokens of the forward, padding included.
            attention_mask: `(rows, seen + count)`, 0 for padding, or None.
            position_ids: `(rows, count)` or `(1, count)`, only to check that they continue the
                sequences; None if the model makes them.

        Returns:
            The plan of the forward.

        Raises:
            BudgetError: the tokens do not fit, whatever is evicted; nothing has changed.
            MemDecayError: the mask or the positions do not continue what was seen.
            ModelError: they would get positions that the model does not have.
            PolicyError: the policy's score is not usable; nothing was evicted.
        """
        if self._repeating is not None:
            self._running = self._repeating
            return self._repeating
        if self.rows and rows != self.rows:
            raise SessionError(
                f"The forward has {rows} sequences, but this cache holds {self.rows}; use one "
                f"cache for each batch."
            )
        real = self._real(rows, count, attention_mask)
        new = real.sum(1).tolist() if real is not None else [count] * rows
        labels = [[*queue] for queue in self._labels]
        fresh = not self.rows
        if fresh:
            self._make_tables(rows)
        decoding = count == 1 and self.seen > 0 and not self.prefilling
        try:
            self._check_positions(count, new, position_ids)
            for number, table in enumerate(self.tables):
                if table.window is not None:
                    self._slide(number, table, max(new))
            self._check_budget(new)
            if decoding or self.stepping:
                self._release_queries()
                if self.on_step is not None:
                    self.on_step(max(new))
            self._make_room(new)
        except MemDecayError:
            if fresh:
                self._clear()
                self._labels = labels
            raise
        self._rollback_point = _Mark(
            lengths=[[*table.lengths] for table in self.tables],
            ledgers=[ledger.mark() for ledger in self.ledgers],
            labels=labels,
            padding=[len(padding) for padding in self._padding],
        )
        self.steps += decoding
        for row, ledger in enumerate(self.ledgers):
            self._enter(row, ledger, new[row])
        if real is not None:
            for row, column in (~real).nonzero().tolist():
                self._padding[row].append(self.seen + column)
        forward = self.forward_type(
            self,
            count=count,
            new=new,
            first_index=self.seen,
            real=real,
            writes={table.window: table.append(self.seen, count, real) for table in self.tables},
            decoding=decoding,
            observing=self._observes(decoding),
        )
        self.seen += count
        self.peak_tokens = max(self.peak_tokens, *map(self.kept, range(self.rows)))
        self._running = forward
        self._last_count = count
        return forward

    @_lasting
    def end(
        self, forward: Forward | ReplayForward, output: Any = None, ids: Tensor | None = None
    ) -> None:
        """Take in what a finished forward observed; called after the model's last layer.

        Args:
            forward: from `begin`.
            output: what the decoder returned; its first entry are the last hidden states,
                `(rows, count, hidden_size)`. Only needed for surprisal, as are the ids.
            ids: `(rows, count)` int64, None if the tokens were given as embeddings.
        """
        if isinstance(forward, ReplayForward):
            self._running = None
            return
        if self._head is not None and output is not None:
            self._read(forward, output[0], ids)  # first, as it is what may run out of memory
        if forward.observing:
            for row, mass in enumerate(forward.masses()):
                if not forward.decoding:
                    self.ledgers[row].hold_queries(mass)
                elif mass.shape[1]:
                    self._observe(row, mass[:, 0])
            self.observations += forward.decoding
        for row, peak in enumerate(forward.peaks()):
            self.ledgers[row].observe_heads(peak, self.clock_of(self.ledgers[row]))
            if self.on_heads is not None:
                self.on_heads(row, peak)
        if self.on_queries is not None:
            for row, queries in enumerate(forward.queries()):
                self.on_queries(row, queries)
        for ledger in self.ledgers if self._head is not None else ():
            ledger.trim()
        if self.stepping and forward.count > 1:
            self.steps += forward.count
            self._release_queries()
        self._running = self._rollback_point = None

    def _read(self, forward: Forward, hidden: Tensor, ids: Tensor | None) -> None:
        """Give each ledger the last hidden states and the ids of its new tokens."""
        for row, ledger in enumerate(self.ledgers):
            mine = slice(None) if forward.real is None else forward.real[row]
            ledger.read(hidden[row, mine], None if ids is None else ids[row, mine].clone())
            if ledger.waiting >= HELD:
                ledger.settle()

    @_lasting
    def abort(self, forward: Forward | ReplayForward) -> None:
        """Take back the tokens of a forward that raised; what was evicted for them stays so."""
        if isinstance(forward, ReplayForward):
            self._running = None
            return
        mark = self._rollback_point
        assert mark is not None
        for table, lengths in zip(self.tables, mark.lengths, strict=True):
            table.truncate(lengths)
        for ledger, before in zip(self.ledgers, mark.ledgers, strict=True):
            ledger.back_to(before)
        for padding, length in zip(self._padding, mark.padding, strict=True):
            del padding[length:]
        self.seen = forward.first_index
        self.steps -= forward.decoding
        self._labels = mark.labels
        self._running = self._rollback_point = None
        self._last_count = 0
        if not self.seen:
            prefilling, stepping = self.prefilling, self.stepping
            self._clear()
            self._labels = mark.labels
            self.prefilling, self.stepping = prefilling, stepping

    def _real(self, rows: int, count: int, attention_mask: Tensor | None) -> Tensor | None:
        if attention_mask is None:
            return None
        if attention_mask.ndim != 2:
            raise MemDecayError(
                f"attention_mask has {attention_mask.ndim} dimensions, but a MemDecayCache takes "
                f"only a 2D mask of padding; it makes the causal mask itself."
            )
        if attention_mask.shape != (rows, self.seen + count):
            raise MemDecayError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but it must be "
                f"{(rows, self.seen + count)}: {rows} sequences, and the {self.seen} tokens seen "
                f"before with the {count} of this forward."
            )
        real = attention_mask[:, -count:].to(self.layout.device, torch.bool)
        return None if bool(real.all()) else real

    def _make_tables(self, rows: int) -> None:
        self.rows = rows
        device = self.layout.device
        # A large budget is allocated as it fills: it may be far more than will ever be read.
        capacity = min(self.budget, _MOST_AT_ONCE) if self.budget else _FIRST_CAPACITY
        self.tables = [
            SlotTable(rows, self._capacity(window, capacity), window, device)
            for window in self.layout.table_windows
        ]
        self.ledgers = [self.new_ledger(self.tables[0].capacity) for _ in range(rows)]
        self._padding = [[] for _ in range(rows)]

    def new_ledger(self, capacity: int = 0) -> Ledger:
        """Return the ledger of a sequence of which nothing was seen yet."""
        return Ledger(**self._ledger_settings(capacity))

    def _ledger_settings(self, capacity: int) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "profile": self.profile,
            "capacity": capacity,
            "page_size": self.page_size,
            "align": self.align,
            "window": self.window,
            "device": self.layout.device,
            "trail": None if self._head is None else Trail(self._head),
        }

    def _capacity(self, window: int | None, capacity: int) -> int:
        """Slots of a table: a sliding one needs its window, and slack to shift it rarely."""
        return capacity if window is None else min(capacity, window + max(64, window // 4))

    @_lasting
    def _make_pool(self, keys: Tensor, values: Tensor, layer: int) -> None:
        if keys.shape != values.shape:
            raise MemDecayError(
                f"Layer {layer} has keys of shape {tuple(keys.shape)} and values of shape "
                f"{tuple(values.shape)}, but a MemDecayCache needs them alike."
            )
        if keys.device != self.layout.device:
            raise ModelError(
                f"The model is on {keys.device}, but it was on {self.layout.device} when this "
                f"cache was made; make a new one."
            )
        self.pools.append(self._new_pool(keys, layer))

    def _new_pool(self, keys: Tensor, layer: int) -> KVPool:
        rows, heads, _, head_dim = keys.shape
        capacity = self.table_of(layer).capacity
        return KVPool(rows, heads, capacity, head_dim, keys.dtype, keys.device)

    @_lasting
    def restored_pool(self, layer: int, saved: Mapping[str, Tensor]) -> KVPool:
        """Return the pool of a layer of which `KVPool.saved` returned this."""
        (kv,) = saved.values()
        _, rows, heads, width, head_dim = kv.shape
        table = self.table_of(layer)
        if (rows, width) != (table.rows, table.width):
            raise ValueError(f"{tuple(kv.shape)}")
        pool = KVPool(rows, heads, table.capacity, head_dim, kv.dtype, kv.device)
        pool.kv[:, :, :, :width] = kv
        return pool

    def adopt(self, ledger: Ledger) -> None:
        """Take a ledger of an earlier time whose tokens are those of the main table."""
        self.ledgers[0] = ledger

    def _check_positions(self, count: int, new: list[int], position_ids: Tensor | None) -> None:
        if len(self._labels) > self.rows and any(self._labels[self.rows :]):
            raise MemDecayError(
                f"row {len(self._labels) - 1} has labels, but the forward has {self.rows} "
                f"sequences."
            )
        # A single token is not looked at, as that would make a GPU wait in every decode step.
        ends = position_ids.amax(-1).tolist() if position_ids is not None and count > 1 else []
        limit = self.layout.hard_limit
        for row, (ledger, extra) in enumerate(zip(self.ledgers, new, strict=True)):
            end = ledger.seen + extra - 1
            if ends and extra and ends[row % len(ends)] not in (end, self.seen + count - 1):
                raise MemDecayError(
                    f"position_ids end at {ends[row % len(ends)]}, but the sequence ends at {end} "
                    f"after this forward; pass only new tokens, with their true positions."
                )
            if limit is not None and ledger.seen + extra > limit:
                raise ModelError(
                    f"The sequence would have {ledger.seen + extra} tokens, but this model has "
                    f"position embeddings for {limit}."
                )

    def _check_budget(self, new: list[int]) -> None:
        """Refuse the next tokens if they cannot fit, before anything is evicted."""
        for ledger, extra in zip(self.ledgers, new, strict=True):
            if self.budget is None or ledger.over(self.budget, extra) <= 0:
                continue
            held, still_open = ledger.stuck()
            room = self.budget - held - still_open
            if extra > room:
                raise BudgetError(
                    f"{extra} new tokens do not fit budget={self.budget}, of which pins hold "
                    f"{held} and the page being filled {still_open} more; run at most "
                    f"{max(room, 0)} tokens a forward (prefill_chunk_size in generate) or raise "
                    f"the budget."
                )

    def _make_room(self, new: list[int]) -> None:
        """Evict until the next tokens fit the budget, or grow if there is none."""
        if self.budget is not None:
            self._evict_excess(
                [
                    self._at_least(ledger, ledger.over(self.budget, extra))
                    for ledger, extra in zip(self.ledgers, new, strict=True)
                ]
            )
        for number, table in enumerate(self.tables):
            need = max(length + extra for length, extra in zip(table.lengths, new, strict=True))
            self._fit_table(number, table, need)

    def _fit_table(self, number: int, table: SlotTable, need: int) -> None:
        """Grow a table that has fewer slots than it will need."""
        if need > table.capacity:
            capacity = max(need, table.capacity + table.capacity // 2)
            if self.budget is not None and not self.by_head:
                capacity = min(capacity, max(need, self.budget))
            self._grow(number, table, capacity)

    def _at_least(self, ledger: Ledger, excess: int) -> int:
        """Return the excess, or what the policy would free at once if it can spare more."""
        wanted = self.policy.evict_at_least * ledger.parts
        if not 0 < excess < wanted:
            return excess
        if self.by_head:
            free = ledger.size - sum(ledger.stuck()) * ledger.parts
        else:
            free = ledger.spare(self.clock_of(ledger))
        return max(excess, min(wanted, free))

    @uninterrupted
    def _grow(self, number: int, table: SlotTable, capacity: int) -> None:
        """Give a table and its pools more slots; the table last, in case memory runs out."""
        for layer, pool in enumerate(self.pools):
            if self.layout.table[layer] == number:
                pool.grow(capacity, table.width)
        if number == 0:
            for ledger in self.ledgers:
                ledger.grow(capacity)
        table.grow(capacity)

    def _evict_excess(self, excess: list[int]) -> None:
        """Evict by the policy, so many tokens of each row; all rows or none."""
        rows = [row for row, number in enumerate(excess) if number > 0]
        if rows and self.on_forget is not None:
            movable(self)
        for row in rows:
            self._release_queries(row)
        plans = [
            self.ledgers[row].plan(excess[row], self.clock_of(self.ledgers[row])) for row in rows
        ]
        for row, gone in zip(rows, plans, strict=True):
            self._forget(row, gone)

    @uninterrupted
    def _forget(self, row: int, gone: Tensor) -> None:
        """Evict tokens of a row, once whoever wants them has them."""
        if self.on_forget is not None:
            self.on_forget(row, self._copied(gone))
        self._drop(row, gone)

    def _copied(self, gone: Tensor) -> Moved:
        """Return a copy of kept tokens, `(kv_len,)` bool."""
        return copy_out(self, gone)

    @uninterrupted
    def _slide(self, number: int, table: SlotTable, new: int) -> None:
        """Free the slots that left the window, once the table has no room for more.

        Pinned or not, no later token can see them; where all layers slide this is an eviction.
        """
        assert table.window is not None
        if table.width + new <= table.capacity:
            return
        table.floor = self.seen
        for row in range(table.rows):
            index = table.index[row, : table.lengths[row]]
            gone = index <= self.seen - table.window
            if number == 0:
                if bool(gone.any()):
                    self._release_queries(row)
                    self._drop(row, gone)
            else:
                self._move(number, row, gone)

    @uninterrupted
    def _drop(self, row: int, gone: Tensor) -> None:
        """Evict tokens of a row from every table, pool and ledger."""
        ledger = self.ledgers[row]
        slots = gone.nonzero().flatten()
        names = ("position", "page", "region")
        evicted = Evicted(row, *(ledger[name].index_select(0, slots) for name in names))
        indices = self.main.index[row].index_select(0, slots)
        pages = ledger.num_pages
        for number, table in enumerate(self.tables):
            if number == 0:
                self._move(0, row, gone)
            else:
                index = table.index[row, : table.lengths[row]]
                self._move(number, row, torch.isin(index, indices))
        self.evicted_tokens += len(evicted.position)
        self.evicted_pages += pages - ledger.num_pages
        if self.on_evict is not None:
            self.on_evict(evicted)

    def _move(self, number: int, row: int, gone: Tensor) -> None:
        table = self.tables[number]
        move = table.drop(row, gone, ordered=table.window is not None)
        if move is None:
            return
        for layer, pool in enumerate(self.pools):
            if self.layout.table[layer] == number:
                pool.move(move)
        if number == 0:
            self.ledgers[row].move(move)

    @_lasting
    def evict(self, positions: Tensor | Sequence[int], row: int = 0) -> int:
        """Evict tokens of a row by their true positions, whatever the policy says.

        Args:
            positions: int64; those not kept are passed over.
            row: which sequence of the batch.

        Returns:
            How many were evicted.
        """
        ledger = self._ledger(row)
        self._release_queries(row)
        wanted = torch.as_tensor(positions, dtype=torch.int64, device=self.layout.device)
        gone = torch.isin(ledger["position"], wanted)
        count = int(gone.sum())
        if count:
            self._drop(row, gone)
        return count

    @_lasting
    def shrink(self, budget: int, row: int | None = None) -> None:
        """Evict by the policy until each row keeps at most `budget` tokens; the budget stays.

        Raises:
            BudgetError: `budget` is not positive, or the pins leave too little to evict.
        """
        _check_integer("budget", budget, 1, BudgetError)
        excess = [ledger.over(budget) for ledger in self.ledgers]
        if row is not None:
            excess = [number if row == other else 0 for other, number in enumerate(excess)]
        for ledger, number in zip(self.ledgers, excess, strict=True):
            held, still_open = ledger.stuck() if number > 0 else (0, 0)
            if number > 0 and held + still_open > budget:
                raise BudgetError(
                    f"budget is {budget}, but pins hold {held} tokens and the page being filled "
                    f"{still_open} more."
                )
        self._evict_excess(excess)

    # Out and back

    @uninterrupted
    @_lasting
    def take(self, positions: Tensor | Sequence[int]) -> Moved:
        """Evict tokens of the one sequence, and return them for `put_back`.

        Args:
            positions: int64, true positions of kept tokens that no pin keeps.

        Returns:
            Copies, on the device of the cache.

        Raises:
            MemDecayError: a position is not kept or is pinned, the cache does not hold exactly one
                sequence without padding, or its heads keep their own tokens; nothing has changed.
        """
        ledger = movable(self)
        wanted = torch.as_tensor(positions, dtype=torch.int64, device=self.layout.device)
        gone = check_taken(ledger, wanted.unique())
        self._release_queries()
        moved = self._copied(gone)
        if len(moved):
            self._drop(0, gone)
        return moved

    @uninterrupted
    @_lasting
    def put_back(self, moved: Moved) -> None:
        """Let tokens be kept again that `take` or `on_forget` gave away, exactly as they were.

        The next token sees them at their true positions, as if they had never left; those that
        were read meanwhile have not seen them. They must come from this sequence: after a rollback
        (`on_rollback`) what was at later positions is not of it any more.

        Args:
            moved: on any device.

        Raises:
            MemDecayError: it is of another model or policy, a position is kept already or was not
                seen yet, or as for `take`; nothing has changed.
            BudgetError: there is no room for all of it.
        """
        moved = check_back(self, moved)
        if len(moved):
            self._release_queries()
            put_in(self, moved)

    def listen(
        self,
        heads: Sequence[tuple[int, int]],
        heard: Callable[[int, Tensor], None] | None,
    ) -> None:
        """Hand out what some heads ask for in every forward from now on.

        Args:
            heads: (layer, query head) each.
            heard: called after a forward with the row and `(number of heads, tokens, head_dim)`,
                the queries of its new tokens, rotated as they met the keys; None to stop.

        Raises:
            MemDecayError: the heads of this cache keep their own tokens.
            ProfileError: the model has no such layer or head.
        """
        if self.by_head:
            raise MemDecayError(
                f"policy {self.policy.name!r} lets heads keep their own tokens, but queries are "
                f"handed out only where all heads keep the same."
            )
        watch = Watch(heads, self.layout)
        self.listened = watch if heard is not None else Watch((), self.layout)
        self.on_queries = heard

    # Idle time

    def unreplayed(self) -> Tensor:
        """Return `(n,)` int64, ascending: positions kept that have not been repeated yet."""
        if not self.rows or "replay" not in self.policy.needs:
            return torch.empty(0, dtype=torch.int64)
        ledger = self._sequence()
        return ledger["position"][~ledger["replayed"]].sort().values

    @_lasting
    def replay_room(self, prompt: int, wanted: int) -> int:
        """Return how many kept tokens `replay` may repeat at once now; evicts if there is no room.

        A piece of n tokens, its prompt included, takes the room of n / num_layers kept tokens. If
        not even a small piece fits, the policy's lowest pages go first, as for the next append;
        but like that, not for more than a quarter of the budget.

        Args:
            prompt: tokens of the repeat prompt.
            wanted: kept tokens to repeat.

        Returns:
            At most `wanted` and 256; 0 if there is no room even so, as pins fill the budget or it
            is tiny, or if the model has no positions left.
        """
        ledger, layers = self._sequence(), len(self.layout.windows)
        most = min(wanted, PIECE)
        if self.layout.hard_limit is not None:
            most = min(most, self.layout.hard_limit - ledger.seen - prompt)
        if self.budget is None or most <= 0:
            return max(most, 0)
        least = prompt + min(most, LEAST)
        excess = ledger.over(self.budget) + token_equivalents(least, layers, ledger.parts)
        if excess > 0:
            held, still_open = ledger.stuck()
            room = min(self.budget // 4, self.budget - held - still_open)
            if token_equivalents(least, layers) <= room:
                self._evict_excess([excess])
        free = -ledger.over(self.budget) * layers // ledger.parts
        return max(0, min(most, free - prompt))

    @_lasting
    def replay(self, ids: Tensor, positions: Tensor, prompt_ids: Tensor) -> Tensor:
        """Let the model repeat kept tokens, and the policy learn what it attended to (`on_replay`).

        Nothing is stored, and nothing but the policy's columns and `replayed` changes: no clock
        moves, and the next forward is what it would have been.

        Args:
            ids: `(n,)` int64, the tokens to repeat.
            positions: `(n,)` int64, their true positions; they are kept.
            prompt_ids: `(m,)` int64, what is said before them.

        Returns:
            `(num_layers, num_heads, kv_len)` float32 in slot order: the most attention that a
            query of these tokens gave to each kept one.

        Raises:
            BudgetError: there is no room for so many tokens; see `replay_room`.
            MemDecayError: the policy does not need replay, the cache does not hold exactly one
                sequence, or a position is not kept.
        """
        if "replay" not in self.policy.needs:
            raise MemDecayError(
                f"policy {self.policy.name!r} does not need replay, but only a policy that does "
                f"learns from one."
            )
        ledger, device = self._sequence(), self.layout.device
        ids, positions = ids.to(device), positions.to(device)
        slots = torch.isin(ledger["position"], positions).nonzero().flatten()
        if not len(ids) or len(ids) != len(positions) or len(slots) != len(positions):
            raise MemDecayError(
                f"positions has {len(positions)} entries of which {len(slots)} are kept, but each "
                f"of the {len(ids)} ids must have one that is kept, and there must be an id."
            )
        run = torch.cat([prompt_ids.to(device), ids])
        layers = len(self.layout.windows)
        extra = token_equivalents(len(run), layers, ledger.parts)
        if self.budget is not None and ledger.over(self.budget) + extra > 0:
            room, free = token_equivalents(len(run), layers), -ledger.over(self.budget)
            raise BudgetError(
                f"{len(run)} tokens to repeat take the room of {room} kept ones, but of "
                f"budget={self.budget} only {free // ledger.parts} are free."
            )
        limit = self.layout.hard_limit
        if limit is not None and ledger.seen + len(run) > limit:
            raise ModelError(
                f"{len(run)} tokens to repeat follow {ledger.seen}, but this model has position "
                f"embeddings for {limit}."
            )
        forward = ReplayForward(self, prompt=len(prompt_ids), count=len(run))
        places = torch.arange(ledger.seen, ledger.seen + len(run), device=device)[None]
        with HeldInterrupts() as held:
            self._repeating = forward
            self.peak_tokens = max(self.peak_tokens, -(-(ledger.size + extra) // ledger.parts))
            try:
                with held.delivered():
                    self.attachment.decoder(
                        input_ids=run[None], position_ids=places, cache=self, use_cache=True
                    )
            finally:
                self._repeating = self._running = None
            attention = forward.observed()
            ledger.replayed(slots, attention, self.clock_of(ledger))
        return attention

    def _sequence(self) -> Ledger:
        if self.rows != 1:
            raise MemDecayError(
                f"The cache holds {self.rows} sequences, but only a cache of one can be repeated."
            )
        return self.ledgers[0]

    # Bookkeeping

    def _observes(self, decoding: bool) -> bool:
        wanted = "attention" in self.policy.needs or self.on_observe is not None
        if not wanted or not self.observe_every:
            return False
        return not decoding or self.steps % self.observe_every == 0

    def _observe(self, row: int, mass: Tensor) -> None:
        ledger = self.ledgers[row]
        refreshed = ledger.observe(mass, self.clock_of(ledger))
        if self.on_observe is not None:
            self.on_observe(row, mass, refreshed)

    def _release_queries(self, row: int | None = None) -> None:
        """Count the end of a prompt as one observation, if one is held."""
        released = False
        for number, ledger in enumerate(self.ledgers):
            if row in (None, number) and ledger.num_queries:
                mass = ledger.release_queries()
                self._observe(number, mass)
                released = True
        self.observations += released

    def _enter(self, row: int, ledger: Ledger, count: int) -> None:
        """Give the next tokens of a row their labels, and enter them."""
        if count == 0:
            return
        queue = self._labels[row] if row < len(self._labels) else []
        left = count
        while left:
            if queue:
                labels = queue.pop(0)
                if len(labels.region) > left:
                    labels, rest = labels.split(left)
                    queue.insert(0, rest)
            else:
                labels = Labels(
                    torch.full((left,), self.default_region),
                    torch.full((left,), ledger.latest_span),
                )
            size = len(labels.region)
            now = self.clock_of(ledger)
            arrival: Tensor | float = now
            if self.clock == "tokens":
                arrival = torch.arange(ledger.seen, ledger.seen + size, dtype=torch.float32)
            elif self.stepping and count > 1:
                first = count - left + 1
                arrival = now + torch.arange(first, first + size, dtype=torch.float32)
            ledger.append(labels, now, arrival)
            left -= size

    @uninterrupted
    def _rollback(self, count: int) -> None:
        """Forget the last `count` tokens seen, padding included, in every row."""
        keep_below = self.seen - count
        for row, ledger in enumerate(self.ledgers):
            for number, table in enumerate(self.tables):
                index = table.index[row, : table.lengths[row]]
                self._move(number, row, index >= keep_below)
            padding = self._padding[row]
            still = bisect.bisect_left(padding, keep_below)
            ledger.rewind(count - (len(padding) - still))
            del padding[still:]
        self.seen = keep_below
        self.rolled_back()

    def _select_rows(self, rows: Tensor) -> None:
        if not self.rows:
            return
        used = [table.width for table in self.tables]
        for layer, pool in enumerate(self.pools):
            pool.select_rows(rows, used[self.layout.table[layer]])
        for table in self.tables:
            table.select_rows(rows)
        self.ledgers = [self.ledgers[row].copy() for row in rows.tolist()]
        queues = self._labels + [[]] * (self.rows - len(self._labels))
        self._labels = [[*queues[row]] for row in rows.tolist()]
        self._padding = [[*self._padding[row]] for row in rows.tolist()]
        self.rows = len(rows)

    @_lasting
    def copy(self) -> MemDecayCache:
        """Return an independent copy, for the same model."""
        other = self._twin(type(self))
        other.tables = [table.copy() for table in self.tables]
        other.pools = [pool.copy() for pool in self.pools]
        other.ledgers = [ledger.copy() for ledger in self.ledgers]
        other._labels = [[*queue] for queue in self._labels]
        other._padding = [[*padding] for padding in self._padding]
        return other

    def _twin(self, kind: type[_Kind]) -> _Kind:
        """Return a cache with these settings, for whoever copies to fill; nobody listens to it."""
        other = object.__new__(kind)
        other.__dict__.update(self.__dict__)
        other.layers = [
            PoolLayer(other, layer, window) for layer, window in enumerate(self.layout.windows)
        ]
        other._labels, other._slabs = [], {}
        other._running = other._repeating = other._rollback_point = None
        other.on_evict = other.on_observe = other.on_heads = None
        other.on_forget = other.on_lower = other.on_rollback = None
        other.on_queries = other.on_step = None
        other.listened = Watch((), self.layout)
        return other

    @_lasting
    def branch(self, kept: Sequence[Tensor], *, row: int = 0) -> MemDecayCache:
        """Return a new cache with a sequence for each keep set, all of them this row so far.

        As many copies of the row would be, with what is not in its keep set evicted from each;
        only what is kept is copied. The sequences go on as rows of one batch, so a forward reads
        the weights once for all of them.

        Args:
            kept: for each new sequence the true positions to keep, `(n,)` int64; those that the
                row does not hold are passed over.
            row: which sequence of this cache.

        Raises:
            MemDecayError: there is no keep set, or one of them is empty.
        """
        base = self._ledger(row)
        self._release_queries(row)
        base.settle()
        slots = []
        for number, positions in enumerate(kept):
            wanted = positions.to(self.layout.device, torch.int64)
            slots.append(torch.isin(base["position"], wanted).nonzero().flatten())
            if not len(slots[-1]):
                raise MemDecayError(f"kept[{number}] holds no token of row {row}.")
        if not slots:
            raise MemDecayError("kept is empty, but it must hold at least one keep set.")
        other = self._twin(MemDecayCache)
        other.rows = len(slots)
        other.ledgers = [base.copy() for _ in slots]
        for ledger, chosen in zip(other.ledgers, slots, strict=True):
            ledger.move(Move(0, len(chosen), order=chosen))
        other._padding = [[*self._padding[row]] for _ in slots]
        other.peak_tokens = max(len(chosen) for chosen in slots)
        indices = [self.main.index[row, chosen] for chosen in slots]
        places = [
            [
                torch.isin(table.index[row, : table.lengths[row]], one).nonzero().flatten()
                for one in indices
            ]
            if table is not self.main
            else slots
            for table in self.tables
        ]
        other.tables = [
            table.branch(row, chosen) for table, chosen in zip(self.tables, places, strict=True)
        ]
        for ledger in other.ledgers:
            ledger.grow(other.main.capacity)
        other.pools = [
            pool.branch(row, places[table], other.tables[table].capacity)
            for pool, table in zip(self.pools, self.layout.table, strict=True)
        ]
        return other

    def branch_heads(self, kept: Sequence[Sequence[Tensor]], *, row: int = 0) -> HeadCache:
        """Return a new cache of one sequence in which each KV head keeps its own tokens of a row.

        It goes on as if each head had been computed over what it keeps from now on; only that is
        copied.

        Args:
            kept: for each layer and KV head the true positions to keep, `(n,)` int64; those that
                the head does not hold are passed over.
            row: which sequence of this cache.

        Raises:
            MemDecayError: it is not one entry a layer and head, nothing is kept, or the row has
                padding.
            ModelError: a layer has a sliding window.
        """
        from memdecay.engine.head_cache import branch_heads

        return branch_heads(self, kept, row)

    def __copy__(self) -> MemDecayCache:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> MemDecayCache:
        return self.copy()

    # Scratch memory of observations

    @_lasting
    def slab(self, table: SlotTable, rows: int, width: int) -> Tensor:
        """Return `(layers of the table, rows, width)` float32 to put probabilities in."""
        layers = self.layout.table.count(self.tables.index(table))
        need = layers * rows * width
        slab = self._slabs.get(table.window)
        if slab is None or slab.numel() < need:
            room = layers * rows * min(table.capacity, width + width // 4 + 64)
            slab = torch.empty(room, device=self.layout.device)
            self._slabs[table.window] = slab
        return slab[:need].view(layers, rows, width)

    def slab_sum(self, table: SlotTable, heads: int) -> Tensor:
        """Return `(batch, width)`, the probabilities of a decode step over layers and heads."""
        slab = self.slab(table, self.rows * heads, table.width)
        layers, _, width = slab.shape
        return slab.view(layers, self.rows, heads, width).sum((0, 2))

    @_lasting
    def zero(self, like: Tensor) -> Tensor:
        """Return the ignored first operand of `baddbmm`."""
        if self._zero is None or self._zero.dtype != like.dtype:
            self._zero = torch.zeros(1, dtype=like.dtype, device=like.device)
        return self._zero


def _check_integer(
    name: str, value: object, minimum: int, error: type[MemDecayError] = MemDecayError
) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise error(f"{name} is {value!r}, but it must be an integer of at least {minimum}.")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        allowed = " or ".join(repr(choice) for choice in choices)
        raise MemDecayError(f"{name} is {value!r}, but it must be {allowed}.")
