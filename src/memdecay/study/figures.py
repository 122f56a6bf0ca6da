"""The pictures of a report, as SVG that takes its ink from the page it stands on."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from memdecay.calibration.figure import draw as draw_curves
from memdecay.policy import retention
from memdecay.policy.memdecay_paper import MemDecayPaper
from memdecay.regions import Profile
from memdecay.study.findings import Findings, base_value, parameters
from memdecay.study.statistics import BASE, NON_SYSTEM

_INK, _FAINT = "#010203", "#040506"
"""Colours that occur in no picture: the page puts its own in their place."""
_BUDGETS = (("#1f86cc", "o"), ("#ee7733", "s"), ("#ee3377", "^"), ("#009988", "D"))
"""Colour and marker of a budget, the largest first; colour-blind people can tell them apart."""
_STYLE = {
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "font.size": 9.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_AGES = 121
_REFRESH_AT = 40
_CONTEXT = 500
"""Tokens in the cache of the second figure; uniform attention is one over it."""


def schematic() -> str:
    """Return Fig. 1: where the policy sits between the orchestrator and the cache."""
    file = resources.files("memdecay.study") / "report_page" / "where.svg"
    return file.read_text("utf-8")


def trajectories() -> str:
    """Return Fig. 2: equation (4) over the age of a token, by the default profile.

    Every token gets half of the uniform share of attention at each step; one token of `tool_out`
    gets four times the uniform share at step 40, which refreshes it.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        styles = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
        for number, region in enumerate(("system", "plan", "user", "tool_out", "scratchpad")):
            scores = _scores(region, _REFRESH_AT if region == "tool_out" else None)
            axes.plot(scores, label=region, color=_COLOURS[region], ls=styles[number], lw=2)
        still = _scores("tool_out", None)
        axes.plot(
            range(_REFRESH_AT, _AGES),
            still[_REFRESH_AT:],
            color=_COLOURS["tool_out"],
            ls=":",
            lw=1.2,
            label="tool_out, never attended to",
        )
        axes.axvline(_REFRESH_AT, color=_FAINT, lw=1)
        axes.text(_REFRESH_AT + 1.5, 1.06, "attended to: its clock starts again", fontsize=9)
        axes.set(
            xlabel="steps since insertion",
            ylabel="retention score",
            xlim=(0, _AGES - 1),
            ylim=(0, 1.12),
        )
        axes.grid(axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return _svg("trajectories", 7.6, 3.3, draw)


def measured(findings: Findings) -> str:
    """Return Fig. 3: mean attention mass per token by region and age, with the fitted lines."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw_curves(axes, findings.curves, findings.fits)

    return _svg(f"{findings.name}-measured", 7.6, 4.0, draw)


def recall(findings: Findings, groups: Sequence[str]) -> str:
    """Return recall and its interval for every policy of these groups, at each budget."""
    found = findings.members(*groups)
    policies = [*(name for name in ("full", BASE) if name not in found), *found]
    policies = [name for name in policies if _cells(findings, name)]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, region, title in (
            (left, NON_SYSTEM, "Outside the system region"),
            (right, "system", "In the system region"),
        ):
            _dots(axes, findings, policies, region)
            axes.set(title=title, xlim=(-0.02, 1.02), xlabel="recall, 95% interval")
            axes.set_yticks(range(len(policies)), policies)
            axes.set_ylim(len(policies) - 0.4, -0.6)
            axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x")
            axes.spines["left"].set_visible(False)
        for label in left.get_yticklabels():
            label.set_fontweight("bold" if label.get_text() == BASE else "normal")
        handles, labels = left.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(
            list(unique.values()), list(unique), loc="outside upper right", ncols=len(unique)
        )

    name = f"{findings.name}-recall-{'-'.join(groups)}"
    return _svg(name, 9.2, 1.25 + 0.34 * len(policies), draw)


def sweeps(findings: Findings) -> str | None:
    """Return recall outside the system region over each parameter that was varied alone."""
    varied = _varied(findings)
    if not varied:
        return None
    columns = min(3, len(varied))
    lines = -(-len(varied) // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
        every: list[Axes] = list(grid.ravel())
        tops = [0.1]
        for axes, (name, points) in zip(every, varied.items(), strict=False):
            _line(axes, findings, name, points)
            tops += [cell["high"] for _, policy in points for cell in _cells(findings, policy)]
        every[0].set_ylim(-0.03, min(1.03, 1.08 * max(top for top in tops if top == top)))
        for axes in every[len(varied) :]:
            axes.set_visible(False)
        for axes in every[::columns]:
            axes.set_ylabel("recall, non-system")
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))

    return _svg(f"{findings.name}-sweeps", 3.1 * columns + 0.4, 2.5 * lines + 0.5, draw)


def _dots(axes: Axes, findings: Findings, policies: Sequence[str], region: str) -> None:
    budgets = findings.budgets
    for place, policy in enumerate(policies):
        whole = findings.cell(policy, 1.0, region)
        shown = (
            [(1.0, whole)] if whole else [(b, findings.cell(policy, b, region)) for b in budgets]
        )
        for number, (budget, cell) in enumerate(shown):
            if not cell:
                continue
            colour, marker = (_INK, "|") if budget == 1.0 else _BUDGETS[budgets.index(budget)]
            offset = 0.0 if len(shown) == 1 else 0.36 * (number / (len(shown) - 1) - 0.5)
            _whisker(axes, "h", place + offset, cell, colour)
            label = "full cache" if budget == 1.0 else f"{budget:.0%} of the cache"
            size = 9 if marker == "|" else 5.5
            axes.plot(
                cell["recall"], place + offset, marker, color=colour, ms=size, label=label, mew=1.5
            )


def _line(axes: Axes, findings: Findings, name: str, points: Sequence[tuple[Any, str]]) -> None:
    places = range(len(points))
    # Between words, unlike between numbers, there is nothing that a line could mean.
    dashes = "-" if sum(not _rank(value)[0] for value, _ in points) > 1 else ""
    for number, budget in enumerate(findings.budgets):
        colour, marker = _BUDGETS[number % len(_BUDGETS)]
        cells = [findings.cell(policy, budget, NON_SYSTEM) for _, policy in points]
        known = [(place, cell) for place, cell in zip(places, cells, strict=True) if cell]
        shift = 0.07 * (number - (len(findings.budgets) - 1) / 2)
        for place, cell in known:
            _whisker(axes, "v", place + shift, cell, colour)
        axes.plot(
            [place + shift for place, _ in known],
            [cell["recall"] for _, cell in known],
            f"{dashes}{marker}",
            color=colour,
            ms=5,
            lw=1.6,
            label=f"{budget:.0%} of the cache",
        )
    axes.set_xticks(
        list(places),
        [f"{value:g}" if isinstance(value, float) else str(value) for value, _ in points],
    )
    for label, (_, policy) in zip(axes.get_xticklabels(), points, strict=True):
        label.set_fontweight("bold" if policy == BASE else "normal")
    axes.set(title=name, xlim=(-0.4, len(points) - 0.6))
    axes.grid(axis="y")


def _whisker(axes: Axes, way: str, place: float, cell: dict[str, Any], colour: str) -> None:
    if cell["low"] == cell["low"]:  # NaN where there is no interval
        ends, at = (cell["low"], cell["high"]), (place, place)
        axes.plot(*((ends, at) if way == "h" else (at, ends)), color=colour, lw=1.4, alpha=0.85)


def _varied(findings: Findings) -> dict[str, list[tuple[Any, str]]]:
    """Return parameter -> (value, policy) in order of value, the study's policy among them."""
    found: dict[str, list[tuple[Any, str]]] = {}
    for policy in findings.members("ablation", "sweep", "noise"):
        changed = parameters(policy)
        if len(changed) == 1 and policy.startswith(f"{BASE}["):
            ((name, value),) = changed.items()
            found.setdefault(name, []).append((value, policy))
    for name, points in found.items():
        points.append((base_value(findings, name), BASE))
        points.sort(key=lambda point: _rank(point[0]))
    return found


def _rank(value: Any) -> tuple[bool, float, str]:
    """Sort numbers, also those written as `4x`, before words."""
    found = re.fullmatch(r"([\d.]+)x?", str(value))
    return (not found, float(found[1]) if found else 0.0, str(value))


def _cells(findings: Findings, policy: str) -> list[dict[str, Any]]:
    found = (findings.cell(policy, budget, NON_SYSTEM) for budget in findings.budgets)
    return [cell for cell in found if cell]


def _scores(region: str, refreshed: int | None) -> list[float]:
    """Return s of one token at each age, by the functions that the engine itself calls."""
    policy, profile = MemDecayPaper(), Profile.default()
    base_priority, decay_rate, _ = (one[profile.id(region)] for one in profile.tensors())
    tau = retention.threshold(policy.refresh_threshold, _CONTEXT)
    importance, clock = torch.zeros(1), torch.zeros(1)
    scores = []
    for now in range(_AGES):
        mass = torch.tensor([(4.0 if now == refreshed else 0.5) / _CONTEXT])
        importance = retention.importance(
            importance, mass, policy.smoothing, torch.tensor([now == 0])
        )
        clock = retention.refresh(clock, mass, tau, now)
        prior = retention.decayed_prior(base_priority[None], decay_rate[None], now - clock)
        scores.append(float(retention.score(prior, importance, policy.attention_weight)))
    return scores


_COLOURS = {
    "system": "#3a66d6",
    "plan": "#9a63dd",
    "user": "#12a5b0",
    "tool_out": "#e8703a",
    "scratchpad": "#8f96a3",
}
"""The colours of the regions, the same as in the commands."""


def _svg(name: str, width: float, height: float, draw: Callable[[Figure], None]) -> str:
    """Draw a figure and return its svg element; the same drawing gives the same text.

    Args:
        name: unique on a page; goes before every id.
        width: inches.
        height: inches.
        draw: fills the figure.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        layout = ConstrainedLayoutEngine(hspace=0.09)
        figure = Figure(figsize=(width, height), layout=layout)
        FigureCanvasSVG(figure)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*|<style.*?</style>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"(id=\"|href=\"#|url\(#)", rf"\g<1>{name}-", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--sans)", text)
    text = text.replace(_INK, "currentColor").replace(_FAINT, "var(--line)")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box, "matplotlib writes a viewBox"
    style = f'style="max-width:{width * 96:.0f}px"'
    return f'<svg {box[0]} role="img" {style}>' + text[text.index(">") + 1 :].strip()
