"""The answer in words and in one table: where the study's policy wins, ties and loses.

A difference counts only if the interval of the paired difference leaves 0 out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memdecay.study.document import Cell, Table, interval, listed, number, plural
from memdecay.study.findings import Findings
from memdecay.study.statistics import ALL, BASE, NON_SYSTEM
from memdecay.study.tables import REGIONS, delta, outcome

RIVALS = {
    "peer": ("peer", "peers"),
    "paper": ("baseline of the paper", "baselines of the paper"),
    "policy": ("further policy", "further policies"),
}
"""The groups that it is compared with, and what one and several of them are called."""

RULE = (
    "A difference counts as a win or a loss only if the 95% interval of the paired difference, "
    "scenarios resampled whole, leaves 0 out; everything else is a tie, which with few scenarios "
    "means “not shown”, not “equal”. Of a hundred comparisons without any true difference, six to "
    "ten are called one by chance."
)


_ANSWERABLE = 0.5
"""Below this share of probes that a full cache answers, recall tells policies hardly apart."""


def answerable(findings: Findings) -> bool:
    """Whether the full cache answers enough of the probes outside the system region."""
    full = findings.cell("full", 1.0, NON_SYSTEM)
    return not full or bool(full["recall"] >= _ANSWERABLE)


def rivals(findings: Findings, group: str) -> list[str]:
    """Return the policies of a group that the study's own is compared with.

    What keeps everything is a check and no rival; what saw the question had another task.
    """
    return [
        name
        for name in findings.members(group)
        if name != BASE and not findings.keeps_all(name) and "question_seen" not in name
    ]


def paragraphs(findings: Findings) -> list[str]:
    """Return what the numbers of a setting say: a summary, then a list for each budget."""
    scenarios = findings.rows["scenario"].nunique()
    episodes = len(findings.rows[["scenario", "variant"]].drop_duplicates())
    opening = (
        f"**{findings.model}, {findings.tier} tier** ({plural(episodes, 'episode')} of "
        f"{plural(scenarios, 'scenario')})."
    )
    if not any(findings.cell(BASE, budget, NON_SYSTEM) for budget in findings.budgets):
        return [f"{opening} There are no rows of `{BASE}` yet, so nothing can be said of it."]
    if scenarios < 2:
        opening += " One scenario has no interval, so nothing below counts as a difference."
    if not answerable(findings):
        full = findings.cell("full", 1.0, NON_SYSTEM)
        opening += (
            f" The full cache answers only {number(full['recall'])} of the probes outside the "
            f"system region, so recall says little here: read the log-probabilities."
        )
    summary = [opening, *(_summary(findings, budget) for budget in findings.budgets)]
    return [" ".join(summary), *(_details(findings, budget) for budget in findings.budgets)]


def _summary(findings: Findings, budget: float) -> str:
    outside, inside = (findings.cell(BASE, budget, region) for region in (NON_SYSTEM, "system"))
    if not outside:
        return f"`{BASE}` was not run with {budget:.0%} of the cache."
    full = findings.cell("full", 1.0, NON_SYSTEM)
    ceiling = f" (the full cache: {number(full['recall'])})" if full else ""
    said = (
        f"With {budget:.0%} of the cache, `{BASE}` answers {_value(outside)} of the probes outside "
        f"the system region{ceiling}"
    )
    if inside:
        full = findings.cell("full", 1.0, "system")
        ceiling = f" (the full cache: {_of(full)})" if full else ""
        said += f" and {_of(inside)} in it{ceiling}"
    results = [
        f"{_score(found)} {place}"
        for region, place in ((NON_SYSTEM, "outside"), ("system", "in it"))
        if (found := _results([findings], "peer", budget, region))
    ]
    return f"{said}{'; against peers ' + ' and '.join(results) if results else ''}."


def _details(findings: Findings, budget: float) -> str:
    """Return a list: whom it loses to, wins against and ties with, in each part of the context."""
    lines = []
    for region, where in ((NON_SYSTEM, "Outside the system region"), ("system", "System region")):
        found = [_against(findings, budget, region, group) for group in RIVALS]
        if any(found):
            lines.append(f"- **{where} at {budget:.0%}.** {' '.join(filter(None, found))}")
    for region in REGIONS:
        if region != "system" and (said := _region(findings, budget, region)):
            lines.append(f"- {said}")
    return "\n".join(lines) or "There is nothing that it could be compared with."


def _against(findings: Findings, budget: float, region: str, group: str) -> str:
    """Say in a sentence whom it is behind, ahead of and level with, the losses first."""
    found: dict[str, list[str]] = {"loss": [], "win": [], "tie": []}
    for policy in rivals(findings, group):
        line = findings.difference(policy, budget, region)
        if line:
            result = outcome(line)
            # The intervals of ties are in the table below; here they would hide the rest.
            found[result].append(f"`{policy}`" + (f" ({_gap(line)})" if result != "tie" else ""))
    total = sum(len(names) for names in found.values())
    if not total:
        return ""
    parts = [
        f"{word} {listed(found[result])}"
        for result, word in (("loss", "behind"), ("win", "ahead of"), ("tie", "level with"))
        if found[result]
    ]
    one, many = RIVALS[group]
    by_logprob = _results([findings], group, budget, region, "logprob")
    said = (
        f"; by the log-probability of the gold answer, {_score(by_logprob)}" if by_logprob else ""
    )
    return f"Of {total} {one if total == 1 else many} it is {'; '.join(parts)}{said}."


def _region(findings: Findings, budget: float, region: str) -> str:
    ours = findings.cell(BASE, budget, region)
    others = [name for group in RIVALS for name in rivals(findings, group)]
    lines = [(name, findings.difference(name, budget, region)) for name in dict.fromkeys(others)]
    lines = [(name, line) for name, line in lines if line]
    if not ours or not lines:
        return ""
    found: dict[str, list[str]] = {"loss": [], "win": [], "tie": []}
    for name, line in lines:
        found[outcome(line)].append(f"`{name}`")
    results = [result for result, names in found.items() for _ in names]
    text = f"**`{region}` facts at {budget:.0%}:** {_value(ours)}. {_score(results)}"
    parts = [f"behind {listed(found['loss'])}"] if found["loss"] else []
    parts += [f"ahead of {listed(found['win'])}"] if found["win"] else []
    return f"{text}{': ' + '; '.join(parts) if parts else ''}."


def _score(results: Sequence[str]) -> str:
    counts = [results.count(result) for result in ("win", "tie", "loss")]
    nouns = ("win", "tie", "loss")
    several = ("wins", "ties", "losses")
    return ", ".join(
        f"{count} {one if count == 1 else many}"
        for count, one, many in zip(counts, nouns, several, strict=True)
    )


def headline(settings: Sequence[Findings]) -> list[str]:
    """Return the whole answer: a sentence, and a list of wins, ties and losses by group."""
    shown = [_standing(one) for one in settings if one.cell("full", 1.0, NON_SYSTEM)]
    few = [one.name for one in settings if not answerable(one)]
    settings = [one for one in settings if answerable(one)]
    budgets = sorted({budget for one in settings for budget in one.budgets}, reverse=True)
    where = ((NON_SYSTEM, "outside the system region"), ("system", "in it"))
    lines = []
    for group, (one_of, many) in RIVALS.items():
        names = {name for one in settings for name in rivals(one, group)}
        parts = []
        for budget in budgets:
            found = [
                f"{_score(results)} {place}"
                for region, place in where
                if (results := _results(settings, group, budget, region))
            ]
            parts += [f"at {budget:.0%} {' and '.join(found)}"] if found else []
        if parts:
            nouns = one_of if len(names) == 1 else many
            lines.append(f"- **Against {len(names)} {nouns}:** {'; '.join(parts)}.")
    opening = f"`{BASE}` is the policy of the paper. Share of probes that it answers:"
    said = [opening, "\n".join(filter(None, shown))] if any(shown) else []
    if few:
        said.append(
            f"In {listed(few)} the full cache answers less than half, so that recall tells "
            f"policies hardly apart; below they do not count."
        )
    if not lines:
        return [*said, f"There is nothing yet that `{BASE}` could be compared with by recall."]
    counted = (
        f"Beside others at the same budget, counted over {plural(len(settings), 'setting')} (not "
        f"all of which have every one):"
    )
    return [*said, counted, "\n".join(lines)]


def _standing(findings: Findings) -> str:
    """Return a line: inside and outside the system region, with what pins alone would do."""
    parts = []
    for budget in findings.budgets:
        inside, outside = (findings.cell(BASE, budget, where) for where in ("system", NON_SYSTEM))
        if not outside:
            continue
        said = f"at {budget:.0%} {_value(outside)}"
        pins = findings.cell("streaming+pins", budget, NON_SYSTEM)
        if pins:
            said += f" (recency with the same pins: {number(pins['recall'])})"
        if inside:
            said += f", instructions {_of(inside)}"
        parts.append(said)
    full, ceiling = (findings.cell("full", 1.0, where) for where in (NON_SYSTEM, "system"))
    if not parts:
        return ""
    whole = f"full cache {number(full['recall'])}" + (
        f", instructions {_of(ceiling)}" if ceiling else ""
    )
    return f"- **{findings.name}**, outside the instructions: {'; '.join(parts)}; {whole}."


def _results(
    settings: Sequence[Findings], group: str, budget: float, region: str, by: str = "recall"
) -> list[str]:
    lines = [
        one.difference(name, budget, region) for one in settings for name in rivals(one, group)
    ]
    # A peer that cannot tell log-probabilities is no tie in them.
    known = [line for line in lines if line and line["logprob_delta"] == line["logprob_delta"]]
    return [outcome(line, by) for line in (known if by == "logprob" else lines) if line]


def score(findings: Findings, budget: float, region: str) -> dict[str, int]:
    """Return how many peers it wins against, ties with and loses to."""
    results = _results([findings], "peer", budget, region)
    return {result: results.count(result) for result in ("win", "tie", "loss")}


def standing(settings: Sequence[Findings], group: str, region: str, title: str) -> Table:
    """Return the difference to every rival of a group, a column for each setting and budget."""
    columns = [(one, b) for one in settings for b in one.budgets if one.cell(BASE, b, region)]
    names = sorted({name for one in settings for name in rivals(one, group)})
    rows: list[list[str | Cell]] = []
    for name in names:
        found = [one.difference(name, budget, region) for one, budget in columns]
        rows.append([f"`{name}`", *(delta(line) if line else "" for line in found)])
    return Table(
        title, ("against", *(f"#{one.name}, {budget:.0%}" for one, budget in columns)), rows
    )


def counts(settings: Sequence[Findings], group: str, by: str = "recall") -> Table:
    """Return wins, ties and losses against a group: a row a setting, a column a region.

    Args:
        settings: what is known.
        group: of the rivals.
        by: "recall", or "logprob" for the log-probability of the gold answer.
    """
    shown = [NON_SYSTEM, *REGIONS]
    rows: list[list[str | Cell]] = []
    for one in settings:
        for budget in one.budgets:
            found = [_results([one], group, budget, region, by) for region in shown]
            if any(found):
                cells = [
                    Cell(
                        " / ".join(str(results.count(name)) for name in ("win", "tie", "loss")),
                        results.count("win") - results.count("loss"),
                    )
                    for results in found
                ]
                rows.append([f"`{one.name}`", one.model, Cell(f"{budget:.0%}", budget), *cells])
    names = {NON_SYSTEM: "non-system"}
    headings = [f"#{names.get(region, region)}" for region in shown]
    return Table(
        f"Won / tied / lost against {RIVALS[group][1]}, by "
        f"{'recall' if by == 'recall' else 'the log-probability of the gold answer'}",
        ("setting", "model", "#budget", *headings),
        rows,
    )


def regions(findings: Findings, group: str) -> Table:
    """Return the difference to every rival of a group, a column for each budget and region."""
    shown = [ALL, NON_SYSTEM, *REGIONS]
    columns = [(budget, region) for budget in findings.budgets for region in shown]
    rows: list[list[str | Cell]] = []
    for name in rivals(findings, group):
        found = [findings.difference(name, budget, region) for budget, region in columns]
        rows.append([f"`{name}`", *(delta(line) if line else "" for line in found)])
    names = {ALL: "all", NON_SYSTEM: "non-system"}
    headings = [f"#{names.get(region, region)}, {budget:.0%}" for budget, region in columns]
    return Table(
        f"`{BASE}` minus each {RIVALS[group][0]}",
        ("against", *headings),
        rows,
        "Recall with the 95% interval of the paired difference over scenarios.",
    )


def _value(cell: dict[str, Any]) -> str:
    return interval(cell["recall"], cell["low"], cell["high"])


def _gap(line: dict[str, Any]) -> str:
    return interval(line["delta"], line["low"], line["high"], signed=True)


def _of(cell: dict[str, Any]) -> str:
    """Return `21 of 24`."""
    return f"{number(cell['recall'] * cell['n'], 0)} of {cell['n']}"
