"""Measure what pages outside cost: ranking them, moving them, their bytes. Prints a table.

    python benchmarks/tiers.py [--quick] [--graded] [--json FILE]

Times are of one thread on the CPU, not of the clock, so a busy machine disturbs them less. Takes a
minute; --quick takes 20 seconds and is noisier. --graded measures too what tokens at fewer bits
inside the cache cost: their bytes, and a decode step over them. --json writes the rows to a file
too, for `memdecay study tiers-report --costs`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from engine import KNOWN, SHAPES
from memdecay.engine import MemDecayCache
from memdecay.engine.known import known_models
from memdecay.engine.moving import Moved
from memdecay.regions import Profile
from memdecay.tiers import (
    DiskStore,
    HostStore,
    Store,
    Summaries,
    Tiers,
    Words,
    nbytes,
    quantize,
    rank,
    rank_by_words,
)

OUTSIDE, PAGE = 100_000, 16
HEAD_DIM = {"smollm2-135m": 64, "qwen2.5-coder-0.5b": 64, "qwen2.5-coder-1.5b": 128}
QUERIES = (1, 8, 16, 32, 64)
BEST = 32
"""Pages that a ranking is asked for."""
CHUNK = 64
RESIDENT, FAR = 4096, 16_384
SAVED = ("", ".sizes")
"""What is saved of a pool that is not of its codes."""


@dataclass(frozen=True)
class Row:
    """One number, and what it is to stay within, if anything."""

    what: str
    model: str
    value: float
    unit: str
    limit: float | None = None


def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """Return the median time of one thread, in ms."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times[1:]) * 1e3


def measure(name: str, rounds: int) -> list[Row]:
    """Return the rows of one model's shape, in bfloat16."""
    known = next(one for one in known_models() if one.name == name)
    shape, head_dim = known.about["shape"], HEAD_DIM[name]
    layers, kv_heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    heads = [(one.layer, one.head) for one in known.evidence["recall"]]
    rng = torch.Generator().manual_seed(0)

    def page(number: int) -> Moved:
        keys = torch.randn(2, layers, kv_heads, PAGE, head_dim, generator=rng)
        keys, values = keys.to(torch.bfloat16)
        positions = torch.arange(PAGE) + PAGE * number
        return Moved(positions=positions, keys=keys, values=values, columns={})

    rows = []
    some = [page(number) for number in range(32)]
    kept = Summaries(
        heads, heads_per_kv=shape["num_attention_heads"] // kv_heads, head_dim=head_dim
    )
    for number in range(OUTSIDE // PAGE):
        kept.add(number, some[number % 32].keys)
    kv = 2 * layers * kv_heads * head_dim * 2
    share = 100 * kept.bytes / (OUTSIDE * kv)
    rows.append(Row("summaries, of the KV they stand for", name, share, "%", 8))
    for count in QUERIES:
        queries = torch.randn(len(heads), count, head_dim, generator=rng)
        took = cpu_ms(lambda queries=queries: rank(queries, kept, BEST), rounds)
        what = f"ranking {OUTSIDE:,} tokens, {len(heads)} heads, {count} queries"
        rows.append(Row(what, name, took, "ms", 10))
    for bits in (8, 4):
        made = [quantize(one, bits) for one in some]
        size = 100 * sum(map(nbytes, made)) / sum(map(nbytes, some))
        rows.append(Row(f"bytes of pages at {bits} bits, of those in bfloat16", name, size, "%"))
        took = cpu_ms(lambda bits=bits: [quantize(one, bits) for one in some], rounds)
        rows.append(Row(f"quantizing 32 pages to {bits} bits", name, took, "ms"))
        took = cpu_ms(lambda made=made: [one.restore() for one in made], rounds)
        rows.append(Row(f"restoring 32 pages from {bits} bits", name, took, "ms"))
    for where, store in (("memory", HostStore()), ("disk", DiskStore())):
        rows += moves(where, store, some, name, rounds)
    return rows


def moves(where: str, store: Store, pages: list[Moved], name: str, rounds: int) -> list[Row]:
    """Return what it costs to put pages into a store and to get them out again."""

    def put() -> None:
        for number, one in enumerate(pages):
            store.put(number, one)

    def pop() -> None:
        for number in range(len(pages)):
            store.pop(number)

    into, out = [], []
    for _ in range(rounds):
        into.append(cpu_once(put))
        out.append(cpu_once(pop))
    return [
        Row(f"32 pages into {where}", name, statistics.median(into), "ms"),
        Row(f"32 pages out of {where}", name, statistics.median(out), "ms", 15),
    ]


def cpu_once(work: Callable[[], object]) -> float:
    """Return the time of one thread, in ms."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def words(rounds: int) -> list[Row]:
    """Return what the second witness costs."""
    ids = torch.randint(0, 150_000, (OUTSIDE,), generator=torch.Generator().manual_seed(0)).tolist()
    kept = Words()
    kept.see(ids)
    for number in range(OUTSIDE // PAGE):
        kept.add(number, ids[PAGE * number : PAGE * (number + 1)])
    took = cpu_ms(lambda: rank_by_words(ids[:32], kept), rounds)
    what = f"ranking {OUTSIDE:,} tokens by 32 words"
    return [Row(what, "any", took, "ms"), Row("words, bytes", "any", kept.bytes / 1e6, "MB")]


def fill(cache: MemDecayCache, count: int) -> None:
    """Let a cache hold tokens with random keys and values, as chunks of a prompt would."""
    config = cache.attachment.decoder.config
    head_dim = config.hidden_size // config.num_attention_heads
    shape = (2, 1, config.num_key_value_heads, CHUNK, head_dim)
    keys, values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(config.dtype)
    cache.prefilling = True
    while cache.seen < count:
        forward = cache.begin(1, CHUNK, None)
        for layer in range(config.num_hidden_layers):
            cache.update(keys, values, layer)
        cache.end(forward)
    cache.prefilling = False


@torch.no_grad()
def graded(name: str, rounds: int) -> list[Row]:
    """Return what a cache with an eighth of its tokens at full precision costs, in float32.

    Where some tokens of every group are gone, scales are gathered token by token.
    """
    model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.float32).eval()
    rows = []
    for bits in (4, 8):
        for size in (16, 32, 64):
            settings = {"full_precision": 128, "bits": bits, "group_size": size}
            cache = MemDecayCache(model, budget=1024, observe_every=0, **settings)
            fill(cache, 1024)
            pool, coded = cache.pools[0], cache.coded_tokens
            used = sum(part.nbytes for end, part in pool.saved(1024).items() if end not in SAVED)
            share = 8 * used / (coded * 2 * pool.kv.shape[2] * pool.kv.shape[4])
            rows.append(Row(f"{bits} bits, groups of {size}: bits an element", name, share, "bits"))
    for count in (1024, 8192):
        caches = {}
        for what, bits in (("full", None), ("4", 4), ("ragged 4", 4), ("8", 8)):
            settings = {} if bits is None else {"full_precision": count // 8, "bits": bits}
            cache = caches[what] = MemDecayCache(
                model, budget=count + CHUNK, policy="streaming", observe_every=0, **settings
            )
            fill(cache, count)
            if what.startswith("ragged"):
                position = cache.ledgers[0]["position"][: cache.coded_tokens]
                cache.evict(position[torch.randperm(len(position))[: len(position) // 20]])
        times: dict[str, list[float]] = {what: [] for what in caches}
        for _ in range(rounds + 1):
            for what, cache in caches.items():
                step = functools.partial(model, input_ids=torch.tensor([[5]]), cache=cache)
                times[what].append(cpu_once(step))
        full = statistics.median(times.pop("full")[1:])
        rows.append(Row(f"a decode step over {count:,} tokens at full precision", name, full, "ms"))
        for what, measured in times.items():
            ratio = statistics.median(measured[1:]) / full
            rows.append(Row(f"the same, 7 of 8 tokens at {what} bits", name, ratio, "times"))
    return rows


@torch.no_grad()
def steps(name: str, rounds: int) -> list[Row]:
    """Return what tiers cost while an answer is written, in float32.

    Two caches of one budget take turns, so that whatever else the machine does meets both: each
    writes as many tokens as there are from one exchange to the next. What they score by is left
    out: a policy that observes nothing makes the rest of a step weigh most.
    """
    model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.float32).eval()
    known = next(one for one in known_models() if one.name == KNOWN[name])
    profile = Profile.default().with_evidence(known.evidence)
    caches = {}
    for what in ("without", "tiers"):
        caches[what] = MemDecayCache(model, budget=RESIDENT, policy="streaming", profile=profile)
    memory = Tiers().open(caches["tiers"])
    for cache in caches.values():
        fill(cache, RESIDENT + FAR)

    def answer(cache: MemDecayCache) -> None:
        for _ in range(memory.every):
            model(input_ids=torch.tensor([[5]]), cache=cache)

    times: dict[str, list[float]] = {what: [] for what in caches}
    for _ in range(rounds + 1):
        for what, cache in caches.items():
            times[what].append(cpu_once(functools.partial(answer, cache)))
    came_back = memory.outside.came_back
    if not came_back or memory.outside.tokens < FAR:
        raise RuntimeError("no exchange took place, so nothing was measured")
    plain, tiered = (statistics.median(times[what][1:]) for what in caches)
    step = (
        f"a decode step, an exchange every {memory.every}, {FAR:,} tokens outside, of one without"
    )
    rows = [
        Row("a decode step without tiers", name, plain / memory.every, "ms"),
        Row(step, name, tiered / plain, "times", 1.05),
    ]
    memory.close()
    return rows


@torch.no_grad()
def back(name: str, rounds: int) -> list[Row]:
    """Return what it costs to bring pages back into a cache, in bfloat16."""
    model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16).eval()
    known = next(one for one in known_models() if one.name == KNOWN[name])
    profile = Profile.default().with_evidence(known.evidence)
    cache = MemDecayCache(model, budget=RESIDENT, policy="streaming", profile=profile)
    memory = Tiers().open(cache)
    outside = memory.outside
    fill(cache, RESIDENT + FAR)
    order = torch.Generator().manual_seed(0)

    def some() -> list[int]:
        pages = [page for page, count in outside.pages.items() if count == PAGE]
        return [pages[n] for n in torch.randperm(len(pages), generator=order)[:32].tolist()]

    free, exchanged = [], []
    cache.budget += 33 * PAGE
    for _ in range(rounds + 1):
        pages = some()
        free.append(cpu_once(functools.partial(outside.recall, pages)))
        outside.send(torch.cat([torch.arange(PAGE) + PAGE * page for page in pages]))
    cache.budget -= 33 * PAGE
    for _ in range(rounds + 1):
        exchanged.append(cpu_once(functools.partial(outside.recall, some())))
    memory.close()
    limit = 15 if KNOWN[name].startswith("smollm2") else None
    took, whole = (statistics.median(times[1:]) for times in (free, exchanged))
    return [
        Row("32 pages back into the cache, where there is room", name, took, "ms", limit),
        Row("32 pages back into the cache, and the 32 worst out", name, whole, "ms"),
    ]


@torch.no_grad()
def from_disk(name: str, rounds: int) -> list[Row]:
    """Return what an exchange with pages on disk takes from the thread that answers, in bfloat16.

    Of that thread only, so that what it would wait for a disk that is slow is not in it.
    """
    model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16).eval()
    known = next(one for one in known_models() if one.name == KNOWN[name])
    profile = Profile.default().with_evidence(known.evidence)
    cache = MemDecayCache(model, budget=RESIDENT, policy="streaming", profile=profile)
    memory = Tiers(host=0, disk=None).open(cache)
    outside, levels = memory.outside, memory.levels
    fill(cache, RESIDENT + FAR)
    cache.budget += 33 * PAGE
    order = torch.Generator().manual_seed(0)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * (rounds + 1)):
        fetched = bool(number % 2)
        pages = [page for page, count in outside.pages.items() if count == PAGE]
        pages = [pages[n] for n in torch.randperm(len(pages), generator=order)[:32].tolist()]
        if fetched:
            levels.fetch(pages)
            while not all(map(levels.at_hand, pages)):
                time.sleep(0.001)
        start = time.thread_time()
        outside.recall(pages)
        times[fetched].append((time.thread_time() - start) * 1e3)
        outside.send(torch.cat([torch.arange(PAGE) + PAGE * page for page in pages]))
    memory.close()
    return [
        Row(f"32 pages on disk back into the cache, {what}", name, statistics.median(one[1:]), "ms")
        for what, one in (("read for it", times[False]), ("fetched before", times[True]))
    ]


def in_caches(name: str, rounds: int) -> list[Row]:
    """Return the rows of caches of one model's shape."""
    return [*steps(name, rounds), *back(name, rounds), *from_disk(name, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--graded", action="store_true", help="tokens at fewer bits in the cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else 15
    torch.set_num_threads(1)
    table = Table("what", "model", "measured", "at most")
    rows = [*(one for name in HEAD_DIM for one in measure(name, rounds)), *words(rounds)]
    rows += [one for name in SHAPES for one in in_caches(name, rounds)]
    if arguments.graded:
        rows += [row for name in SHAPES for row in graded(name, rounds)]
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g} {row.unit}"
        digits = {"times": 3, "bits": 2}.get(row.unit, 1)
        table.add_row(row.what, row.model, f"{row.value:.{digits}f} {row.unit}", limit)
    Console().print(table)
    if arguments.json is not None:
        text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
