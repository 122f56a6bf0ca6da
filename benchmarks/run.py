"""Measure every engine number, print the table, and write docs/results/engine.md.

    python benchmarks/run.py [--quick] [--json]

Takes about fifteen minutes on one core; --quick takes four, is noisier and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

import policy_update
from engine import (
    Row,
    budgeted_decode,
    decode_steps,
    eviction,
    medians,
    prefill,
    ratio,
    replay,
)
from memdecay.policy import DEFAULT_POLICY

RESULT = Path(__file__).parent.parent / "docs" / "results" / "engine.md"
SMOLLM2, QWEN = "SmolLM2-135M", "Qwen2.5-0.5B"


def rows(quick: bool) -> Iterator[Row]:
    """Measure, one row after the other."""
    rounds = 6 if quick else 40
    for model, against_stock in ((SMOLLM2, 0.85), (QWEN, 0.95)):
        for count in (500, 2000, 8000):
            times = decode_steps(model, torch.float32, count, rounds)
            scored = ratio(times, "scored", "unscored")
            detail = medians(times)
            what = f"scored step / own unscored step, k=1, fp32, {count} tokens"
            yield Row(what, model, scored, 1.03, detail=detail)
            amortised = 1 + (scored - 1) / 16
            what = f"the same at k=16, fp32, {count} tokens (from the row above)"
            yield Row(what, model, amortised, 1.005)
            if count == 8000:
                stock = ratio(times, "scored", "stock")
                what = "scored step / stock DynamicCache + sdpa step, 8000 tokens"
                yield Row(what, model, stock, against_stock, detail=detail)
    for model in (SMOLLM2, QWEN):
        for count in (500, 2000, 8000):
            times = decode_steps(model, torch.bfloat16, count, max(4, rounds // 4))
            what = f"scored step / own unscored step, k=1, bf16, {count} tokens"
            value = ratio(times, "scored", "unscored")
            yield Row(what, model, value, 1.05, detail=medians(times))
    for model, target in ((SMOLLM2, 2.8), (QWEN, 1.7)):
        value, detail = budgeted_decode(model, 16_000, 32 if quick else 96)
        what = "decoding at 25% of 16000 tokens / full DynamicCache, tokens per second"
        yield Row(what, model, value, target, at_least=True, detail=detail)
    prefills = {SMOLLM2: {1000: 7, 2000: 5, 4000: 3}, QWEN: {1000: 5, 2000: 3}}
    for model, counts in prefills.items():
        for count, times_each in counts.items():
            if not quick or count == 1000:
                value, detail = prefill(model, count, 3 if quick else times_each)
                what = f"prefill with window observation / plain sdpa prefill, {count} tokens"
                yield Row(what, model, value, 1.02, detail=detail)
    yield from default_rows(quick)
    for model in (SMOLLM2, QWEN):
        for policy, what in (
            ("memdecay-paper", "two pages"),
            (DEFAULT_POLICY, "32 single tokens"),
        ):
            value, detail = eviction(model, 8000, 5 if quick else 15, policy)
            yield Row(
                f"choosing and evicting {what}, all layers, 8000 tokens",
                model,
                value,
                2.0,
                "ms",
                detail=f"{policy}, {detail}",
            )
    timing = policy_update.measure()
    for part in ("one_page", "quarter"):
        what = f"policy update, score and selection at 131,072 tokens, evicting {part}"
        value = timing[f"total_{part}_ms"]
        detail = f"observe {timing['observe_ms']:.2f} ms, select {timing[f'plan_{part}_ms']:.2f} ms"
        yield Row(what.replace("_", " "), "memdecay-paper", value, 2.0, "ms", detail=detail)


def default_rows(quick: bool) -> Iterator[Row]:
    """Measure what the default policy adds: its heads watched, single tokens evicted.

    It may cost 2% more than the rows of the paper's policy allow.
    """
    rounds = 4 if quick else 20
    for model in (SMOLLM2, QWEN):
        for dtype, bound in ((torch.float32, 1.03), (torch.bfloat16, 1.05)):
            for count in (500, 8000):
                times = decode_steps(model, dtype, count, rounds, DEFAULT_POLICY)
                kind = str(dtype).removeprefix("torch.")
                what = f"{DEFAULT_POLICY}: scored step / unscored step, {kind}, {count} tokens"
                value = ratio(times, "scored", "unscored")
                yield Row(what, model, value, round(bound + 0.02, 3), detail=medians(times))
    for model, target in ((SMOLLM2, 2.8), (QWEN, 1.7)):
        value, detail = budgeted_decode(model, 16_000, 32 if quick else 96, DEFAULT_POLICY)
        what = f"{DEFAULT_POLICY}: decoding at 25% of 16000 tokens / full DynamicCache"
        yield Row(what, model, value, round(target * 0.98, 3), at_least=True, detail=detail)
    for model in (SMOLLM2, QWEN):
        for count in (1000,) if quick else (1000, 2000):
            value, detail = prefill(model, count, 3, DEFAULT_POLICY)
            what = f"{DEFAULT_POLICY}: prefill / plain sdpa prefill, {count} tokens"
            yield Row(what, model, value, 1.04, detail=detail)
        value, detail = replay(model, 1000, 2)
        what = "memdecay-replay: repeating 1000 kept tokens in idle time / reading them"
        yield Row(what, model, value, math.inf, detail=detail)


def provenance() -> dict[str, str]:
    """Return what the numbers depend on."""
    git = ["git", "-C", str(RESULT.parent.parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, 1 thread",
    }


def markdown(measured: list[Row], where: dict[str, str]) -> str:
    """Return the result page."""
    missed = [row for row in measured if not row.reached]
    lines = [
        "# Engine: what was measured",
        "",
        "Command: `make bench`. Ratios are medians over interleaved rounds of one run; "
        "random weights in the shapes of the models.",
        "",
        ", ".join(f"{name} {value}" for name, value in where.items()) + ".",
        "",
        f"{len(measured) - len(missed)} of {len(measured)} rows reach their target.",
        "",
        "| what | model | measured | to reach | reached | medians |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.what} | {row.model} | {_value(row)} | {_target(row)} | "
        f"{'yes' if row.reached else '**no**'} | {row.detail} |"
        for row in measured
    ]
    return "\n".join(lines) + "\n"


def _value(row: Row) -> str:
    return f"{row.value:.2f} ms" if row.unit == "ms" else f"{row.value:.3f}"


def _target(row: Row) -> str:
    if math.isinf(row.target):
        return "reported"
    unit = " ms" if row.unit == "ms" else ""
    return f"{'≥' if row.at_least else '≤'} {row.target:g}{unit}"


def main() -> int:
    """Measure and report; exit 0 whatever was reached, as speed is no test."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, nothing written")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured: list[Row] = []
    columns = (SpinnerColumn(), "{task.description}", TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        for row in rows(arguments.quick):
            measured.append(row)
            progress.update(
                task, description=f"{len(measured)} rows; last: {row.what}, {row.model}"
            )
    where = provenance()
    if arguments.json:
        json.dump({**where, "rows": [dataclasses.asdict(row) for row in measured]}, sys.stdout)
    else:
        table = Table("what", "model", "measured", "to reach", "")
        for row in measured:
            mark = "[green]reached[/]" if row.reached else "[red]missed[/]"
            table.add_row(row.what, row.model, _value(row), _target(row), mark)
        Console().print(table)
    if not arguments.quick:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(markdown(measured, where), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
