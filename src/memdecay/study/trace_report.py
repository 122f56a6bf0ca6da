"""What a run of traces says: means over traces with intervals, and policies trace by trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memdecay.errors import StudyError
from memdecay.study.document import Cell, Section, Table, interval, listed, markdown, number, plural
from memdecay.study.statistics import intervals
from memdecay.study.trace_play import WITH_CODES, WITH_LADDER, plain_name
from memdecay.study.traces import TRACE_SCHEMA

FIELDS = (
    *("model", "dtype", "policy", "policy_config", "budget", "n", "refused", "scored_tokens"),
    *("nll", "delta_nll", "low", "high", "agreement", "agreement_low", "agreement_high"),
    *("peak_share", "idle_s", "against", "score_chunk", "seed", "commit"),
)
"""The fields of every cell, in this order."""

_MORE = (
    f"The budget is of tokens at full precision, which all have alike. Beside them {WITH_LADDER} "
    f"keeps as many again at 4 bits, at least 1.3 times the bytes, and {WITH_CODES} all others."
)
_CELL = ["policy", "policy_config", "budget"]
_ONE = ("model", "weights", "dtype", "settings")


def gather(folder: Path) -> pd.DataFrame:
    """Return all rows of a run, in a fixed order.

    Raises:
        StudyError: there are none, a file is not one of rows, or they do not belong together.
    """
    files = sorted(folder.glob("rows/*.parquet"))
    if not files:
        raise StudyError(
            f"FOLDER is '{folder}', but there are no rows under it; it must be one that "
            f"`memdecay study traces` wrote."
        )
    tables = []
    for file in files:
        try:
            tables.append(pq.read_table(file).select(TRACE_SCHEMA.names).cast(TRACE_SCHEMA))
        except (pa.ArrowException, KeyError, OSError):
            raise StudyError(f"{file.name!r} is not a parquet file of a traces run.") from None
    frame: pd.DataFrame = pa.concat_tables(tables).to_pandas()
    for name in _ONE:
        found = sorted(set(frame[name]))
        if len(found) > 1:
            raise StudyError(
                f"The rows under '{folder}' have {len(found)} values of {name!r} "
                f"({', '.join(map(repr, found))}), so they cannot be compared."
            )
    for columns, key in ((["trace_digest", "tokens"], ["trace"]), (["scored_tokens"], ["trace"])):
        for name in columns:
            if bool((frame.groupby(key)[name].nunique() > 1).any()):
                raise StudyError(f"The rows under '{folder}' are of two texts of one trace.")
    if bool(frame.duplicated(["trace", *_CELL]).any()):
        raise StudyError(f"The rows under '{folder}' hold a trace, policy and budget twice.")
    return frame.sort_values(
        ["budget", "policy", "policy_config", "trace"], ascending=[False, True, True, True]
    ).reset_index(drop=True)


def cells(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one object a policy and budget.

    Args:
        rows: what `gather` returns.

    Returns:
        Objects with exactly `FIELDS`. Every trace counts once, whatever its length: nll and
        delta_nll (nats per assistant token; above 0 the full cache foresaw more) and agreement
        (share of tokens whose most likely one is the full cache's) are means over `n` traces with
        95% bootstrap intervals over traces. `refused`: traces whose pins do not fit the budget.
        peak_share: most resident tokens over the budget, at worst. `against`: other policy ->
        on how many of the `n` traces of both its delta_nll is lower (`wins`) or higher
        (`losses`), and the mean paired difference with its interval (widened as the study's;
        below 0 in favour of this cell's policy). What is not known is None.
    """
    groups = list(rows.groupby(_CELL, sort=False))
    names = _names([key for key, _ in groups])
    traces = sorted(set(rows["trace"]))
    found = []
    deltas = {
        key: group.set_index("trace")["delta_nll"].reindex(traces).to_numpy(dtype=float)
        for key, group in groups
    }
    for key, group in groups:
        done = group[group["refused"] == ""]
        delta, agreement = (_mean(done, name) for name in ("delta_nll", "top1_agreement"))
        peak = (done["peak_resident_tokens"] / done["budget_tokens"]).max()
        cell = {
            "model": group["model"].iloc[0],
            "dtype": group["dtype"].iloc[0],
            "policy": names[key],
            "policy_config": json.loads(key[1]),
            "budget": float(key[2]),
            "n": len(done),
            "refused": len(group) - len(done),
            "scored_tokens": int(done["scored_tokens"].sum()),
            "nll": done["nll"].mean(),
            **dict(zip(("delta_nll", "low", "high"), delta, strict=True)),
            **dict(zip(("agreement", "agreement_low", "agreement_high"), agreement, strict=True)),
            "peak_share": peak,
            "idle_s": done["idle_s"].sum(),
            "against": {
                names[other]: _against(deltas[key], deltas[other])
                for other, _ in groups
                if other != key and other[2] == key[2]
            },
            "score_chunk": int(group["score_chunk"].iloc[0]),
            "seed": int(group["seed"].iloc[0]),
            "commit": "+".join(sorted(set(group["commit"]))),
        }
        found.append({name: _plain(cell[name]) for name in FIELDS})
    return found


def rises(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what tiers leave of the rise in NLL, one object a policy with tiers and budget.

    Args:
        rows: what `gather` returns.

    Returns:
        Objects with policy (that with tiers), budget, n (traces of both, `refused` ones left out),
        delta_nll, delta_nll_without (means over them, nats per token), and share: the former over
        the latter, with its 95% interval over traces, `low` to `high`. What is not known is None.
    """
    done = rows[rows["refused"] == ""]
    found = []
    for (policy, config, budget), group in done.groupby(_CELL, sort=False):
        about = json.loads(config)
        if about.pop("tiers", None) is None:
            continue
        about.pop("quantized", None)
        about["name"] = plain_name(str(about["name"]))
        same = done["policy_config"] == json.dumps(about, sort_keys=True)
        plain = done[same & (done["budget"] == budget)]
        pairs = group.merge(plain, on="trace", suffixes=("", "_without"), validate="one_to_one")
        ours, theirs = (
            pairs[name].to_numpy(dtype=float) for name in ("delta_nll", "delta_nll_without")
        )
        share = low = high = float("nan")
        # Of what did not rise there is no share.
        if len(pairs) and theirs.mean() > 0:
            share = float(ours.sum() / theirs.sum())
        if len(pairs) > 1 and bool((theirs > 0).all()):
            # Sums over counts, so that resampling traces resamples both rises together.
            low, high = (float(end[0]) for end in intervals(ours[None], theirs[None]))
        line = {
            "policy": policy,
            "budget": float(budget),
            "n": len(pairs),
            "delta_nll": float(ours.mean()) if len(pairs) else float("nan"),
            "delta_nll_without": float(theirs.mean()) if len(pairs) else float("nan"),
            **{"share": share, "low": low, "high": high},
        }
        found.append({name: _plain(value) for name, value in line.items()})
    return found


def cells_json(rows: pd.DataFrame) -> str:
    """Return `cells` as a JSON list with one object a line, so that a diff shows what moved."""
    lines = [json.dumps(cell, allow_nan=False) for cell in cells(rows)]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def document(name: str, rows: pd.DataFrame) -> str:
    """Return the report of a run as Markdown."""
    found = cells(rows)
    first = rows.iloc[0]
    traces = rows.drop_duplicates("trace")
    scored = traces["trace"].map(
        rows.dropna(subset="scored_tokens").groupby("trace")["scored_tokens"].first()
    )
    opening = (
        f"**{first['model']}** in {first['dtype']} read {plural(len(traces), 'recorded trace')} "
        f"({int(traces['tokens'].sum()):,} tokens, of which the assistant wrote "
        f"{int(scored.sum()):,}) under every policy, and the assistant's tokens were scored "
        f"against the full cache. Δ NLL is in nats per token, above 0 where evicting made the "
        f"recorded tokens less likely. Every trace counts once; brackets are 95% percentile "
        f"bootstraps over traces."
    )
    chunk = int(first["score_chunk"])
    how = (
        "The assistant's tokens were read one by one, as decode steps."
        if chunk == 1
        else f"Up to {chunk} of the assistant's tokens were read by one forward: room was made "
        f"before them, and their attention observed after them, for every policy alike."
    )
    cut = json.loads(first["settings"])["max_tokens"]
    how += f" Traces were cut before the turn that passes {cut:,} tokens." if cut else ""
    beyond = traces[traces["past_trained"] > 0]
    if len(beyond):
        how += (
            f" Of {plural(len(beyond), 'trace')} the last {int(beyond['past_trained'].sum()):,} "
            f"tokens are past the positions that the model was trained for, where what it says is "
            f"not to be trusted, with or without eviction: {listed(sorted(beyond['trace']))}."
        )
    bounded = [cell for cell in found if cell["peak_share"] is not None]
    budgets = list(dict.fromkeys(cell["budget"] for cell in bounded))
    sections = [Section("What evicting cost", (opening, how, _costs(found)))]
    left = rises(rows)
    if left:
        sections.append(Section("What tiers leave of it", (left_of_rises(left),)))
    pairs = [_pairs([one for one in bounded if one["budget"] == share]) for share in budgets]
    if any(len(table.rows) > 1 for table in pairs):
        sections.append(Section("Policy against policy", [t for t in pairs if len(t.rows) > 1]))
    sections.append(Section("Trace by trace", [_traces(rows, share) for share in budgets]))
    left_out = rows[rows["refused"] != ""]
    if len(left_out):
        lines = [
            f"- {row['trace']}, `{row['policy']}` at {row['budget']:.0%}: {row['refused']}"
            for row in left_out.to_dict("records")
        ]
        why = "These were not run, and are in none of the numbers of their policy and budget:"
        sections.append(Section("What did not fit", (why, "\n".join(lines))))
    sections.append(Section("How it was made", (_made(rows),)))
    return markdown(f"Traces: {name}", sections)


def known(value: float | None) -> float:
    """Return a number, NaN for None."""
    return float("nan") if value is None else value


def _costs(found: Sequence[dict[str, Any]]) -> Table:
    idle = any(cell["idle_s"] for cell in found)
    lines: list[list[str | Cell]] = []
    for cell in found:
        delta, low, high = (known(cell[name]) for name in ("delta_nll", "low", "high"))
        same = [known(cell[f"agreement{end}"]) * 100 for end in ("", "_low", "_high")]
        lines.append(
            [
                f"`{cell['policy']}`",
                f"{cell['budget']:.0%}",
                str(cell["n"]),
                number(known(cell["nll"]), 3),
                interval(delta, low, high, 3, signed=True),
                interval(same[0], same[1], same[2], 1),
                *([f"{cell['idle_s']:.0f}"] if idle else []),
            ]
        )
    columns = ("policy", "#budget", "#traces", "#NLL", "#Δ NLL [95%]", "#same top token, % [95%]")
    return Table("Cost by policy and budget", (*columns, *(["#idle, s"] if idle else [])), lines)


def left_of_rises(found: Sequence[dict[str, Any]]) -> Table:
    """Return what `rises` found as a table."""
    lines: list[list[str | Cell]] = []
    for line in found:
        deltas = [known(line[f"delta_nll{end}"]) for end in ("", "_without")]
        share = [100 * known(line[name]) for name in ("share", "low", "high")]
        lines.append(
            [
                f"`{line['policy']}`",
                f"{line['budget']:.0%}",
                str(line["n"]),
                *(number(value, 3, signed=True) for value in deltas),
                interval(share[0], share[1], share[2], 1),
            ]
        )
    return Table(
        "The rise in NLL with tiers, as a share of that of the same policy and budget without",
        ("policy", "#budget", "#traces", "#Δ NLL", "#without", "#share, % [95%]"),
        lines,
        _MORE if any(line["policy"].endswith((WITH_LADDER, WITH_CODES)) for line in found) else "",
    )


def _pairs(found: Sequence[dict[str, Any]]) -> Table:
    names = [cell["policy"] for cell in found]
    lines: list[list[str | Cell]] = []
    for cell in found:
        line: list[str | Cell] = [f"`{cell['policy']}`"]
        for other in names:
            pair = cell["against"].get(other)
            line.append(f"{pair['wins']} of {pair['n']}" if pair else "")
        lines.append(line)
    return Table(
        f"Traces won at {found[0]['budget']:.0%}",
        ("policy", *(f"#over `{name}`" for name in names)),
        lines,
        "On how many traces the policy of the row has the lower Δ NLL; the paired differences and "
        "their intervals are in the JSON.",
    )


def _traces(rows: pd.DataFrame, share: float) -> Table:
    some = rows[(rows["budget"] == share) & rows["budget_tokens"].notna()]
    keys = list(dict.fromkeys(zip(*(some[name] for name in _CELL), strict=True)))
    names = _names(keys)
    lines: list[list[str | Cell]] = []
    for trace, group in some.groupby("trace", sort=True):
        values = {tuple(row[name] for name in _CELL): row for row in group.to_dict("records")}
        cells_ = [known(values[key]["delta_nll"]) if key in values else known(None) for key in keys]
        full = group["full_nll"].iloc[0]
        lines.append(
            [
                str(trace),
                f"{int(group['tokens'].iloc[0]):,}",
                number(float(full), 3),
                *(number(value, 3, signed=True) for value in cells_),
            ]
        )
    return Table(
        f"Δ NLL at {share:.0%}",
        ("trace", "#tokens", "#NLL, full", *(f"#`{names[key]}`" for key in keys)),
        lines,
    )


def _made(rows: pd.DataFrame) -> str:
    dates = sorted(set(rows["date"]))
    commits = sorted({commit[:10] for commit in rows["commit"] if commit})
    versions: dict[str, set[str]] = {}
    for text in set(rows["versions"]):
        for name, version in json.loads(text).items():
            versions.setdefault(name, set()).add(str(version))
    said = [f"Rows of {listed(dates)}"]
    said += [f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"] if commits else []
    said += [f"seed {rows['seed'].iloc[0]}"]
    said += [f"{name} {', '.join(sorted(found))}" for name, found in sorted(versions.items())]
    return " · ".join(said) + "."


def _names(keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], str]:
    """Return what cells are called: by their parameters too where one name has several."""
    shown = {}
    for key in keys:
        policy, config, budget = key
        rivals = {one[1] for one in keys if one[0] == policy and one[2] == budget}
        parameters = {k: v for k, v in json.loads(config).items() if k != "name"}
        told = ",".join(f"{name}={value}" for name, value in parameters.items())
        shown[key] = f"{policy}({told})" if len(rivals) > 1 else str(policy)
    return shown


def _mean(done: pd.DataFrame, name: str) -> tuple[float, float, float]:
    """Return a mean over traces and its interval."""
    values = done[name].to_numpy(dtype=float)
    if not len(values):
        return (float("nan"),) * 3
    low, high = intervals(values[None], np.ones((1, len(values))))
    return float(values.mean()), float(low[0]), float(high[0])


def _against(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> dict[str, Any]:
    """Compare two policies on the traces that both were run on, `(traces,)` each, NaN if not."""
    difference = ours - theirs
    difference = difference[~np.isnan(difference)]
    if not len(difference):
        return {"wins": 0, "losses": 0, "n": 0, "delta": None, "low": None, "high": None}
    low, high = intervals(difference[None], np.ones((1, len(difference))), widened=True)
    return {
        "wins": int((difference < -1e-9).sum()),
        "losses": int((difference > 1e-9).sum()),
        "n": len(difference),
        "delta": _plain(float(difference.mean())),
        "low": _plain(float(low[0])),
        "high": _plain(float(high[0])),
    }


def _plain(value: Any) -> Any:
    """Return a number as JSON can have it: twelve digits, and None for what is not known."""
    if not isinstance(value, (float, np.floating)):
        return value
    # The last bits of a sum depend on the order of its terms, which a library may change.
    return None if not np.isfinite(value) else float(f"{value:.12g}")
