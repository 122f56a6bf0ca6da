"""The report of a study: one Markdown and one JSON file a setting, and one page for all of them.

The same rows give the same bytes: intervals are seeded, and every date comes from the rows.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from memdecay.errors import StudyError
from memdecay.study import figures, tables, verdict
from memdecay.study.beside_paper import beside_paper
from memdecay.study.cells import cells_json
from memdecay.study.document import (
    Picture,
    Section,
    Table,
    html_sections,
    html_text,
    inline,
    listed,
    markdown,
    plural,
    slug,
)
from memdecay.study.findings import Findings, gather
from memdecay.study.statistics import BASE, NON_SYSTEM

PAGE = "study.html"

_Blocks = list[str | Table | Picture]

_INTERVALS = (
    "Intervals in brackets are 95% percentile bootstraps over scenarios, as in the paper; with "
    "eight scenarios such an interval covers 84 to 89% (measured on synthetic studies). Those of "
    "differences are widened for that and cover 90 to 94%."
)


def find_runs(
    paths: Sequence[Path],
    names: Sequence[str] | None = None,
    kinds: Sequence[str] = ("rows", "peers"),
    command: str = "run",
) -> list[Path]:
    """Return the folders of the settings in these folders, by name.

    Args:
        paths: each the folder of one setting, or a folder of such folders.
        names: the settings that are wanted, all if None or empty.
        kinds: the folders in that of a setting, of which one must hold rows.
        command: of `memdecay study`, which writes them.

    Raises:
        StudyError: a folder has no rows, a setting is not there, or two folders have its name.
    """
    found: dict[str, Path] = {}
    for path in paths:
        inside = [path] if _has_rows(path, kinds) else []
        if not inside and path.is_dir():
            inside = sorted(child for child in path.iterdir() if _has_rows(child, kinds))
        if not inside:
            raise StudyError(
                f"RUNS is '{path}', but there are no rows in it; it must be a folder that "
                f"`memdecay study {command}` wrote, or one of such folders."
            )
        for folder in inside:
            name = folder.resolve().name
            if name in found and found[name].resolve() != folder.resolve():
                raise StudyError(
                    f"The setting {name!r} is in '{found[name]}' and in '{folder}', but a report "
                    f"can show one of them."
                )
            found[name] = folder
    for name in names or ():
        if name not in found:
            known = ", ".join(sorted(found))
            raise StudyError(f"--setting is {name!r}, but it must be one of {known}.")
    return [found[name] for name in sorted(names or found, key=_setting_order)]


def build(folders: Sequence[Path]) -> tuple[list[Findings], dict[str, str]]:
    """Return what was found in these runs and the files of their report, by name.

    Raises:
        StudyError: a folder's rows cannot be read, or do not belong together.
    """
    settings = [gather(folder) for folder in folders]
    names = [one.name for one in settings]
    for name in names:
        if names.count(name) > 1:
            raise StudyError(f"Two folders hold rows of the setting {name!r}; give one of them.")
    bodies = [sections(one) for one in settings]
    files: dict[str, str] = {}
    for one, body in zip(settings, bodies, strict=True):
        files[f"{one.name}.md"] = setting_markdown(one, body)
        files[f"{one.name}.json"] = cells_json(one.rows, one.summary)
    files[PAGE] = page(settings, bodies)
    return settings, files


def setting_markdown(findings: Findings, body: Sequence[Section]) -> str:
    """Return the Markdown of one setting; `body` is what `sections` returns."""
    opening = Section(
        "The answer",
        (
            *verdict.paragraphs(findings),
            verdict.RULE,
            f"Pictures and all settings: `{PAGE}`, which the report writes beside this page.",
        ),
    )
    return markdown(f"Study: {findings.name}", [opening, *body])


def sections(findings: Findings) -> list[Section]:
    """Return everything after the opening paragraphs; what was not run has no section."""
    made = [
        Section("Win, tie or loss", _against(findings)),
        Section("Region lifetimes", _lifetimes(findings)),
        Section("Recall", _recall(findings, ("paper", "policy"), "Recall (Tables III and IV)")),
        Section("Peers at the same budget", _peers(findings)),
        Section("Scenario by scenario", _signs(findings)),
        Section("Ablation", _ablation(findings)),
        Section("Sweeps", _sweeps(findings)),
        Section("Label noise", _group(findings, "noise", "Spans with a wrong label")),
        Section(
            "Terms of memdecay", _group(findings, "terms", "memdecay without one of its terms")
        ),
        Section("Controls", _group(findings, "control", "Bounds and controls")),
        Section("Overhead", [tables.overhead(findings)] if findings.overhead else []),
        Section("Beside the paper", [beside_paper(findings)]),
        Section("What was counted, and what is missing", _counting(findings)),
        Section("How it was made", [provenance([findings]), _INTERVALS]),
    ]
    return [section for section in made if section.blocks]


def page(settings: Sequence[Findings], bodies: Sequence[Sequence[Section]]) -> str:
    """Return all settings as one HTML page that loads nothing from anywhere.

    Args:
        settings: what is known.
        bodies: `sections` of each.
    """
    title = f"Where {BASE} stands"
    body = [f"<h1>{inline(title)}</h1>"]
    body += [html_text(text) for text in verdict.headline(settings)]
    body.append(f"<p>{inline(verdict.RULE)}</p>")
    body.append(
        '<p class="key"><span class="win">▲ better</span> <span class="loss">▼ worse</span> '
        "and no colour: not shown. A click on a heading sorts by it.</p>"
    )
    body.append(html_sections(_overview(settings), "all"))
    for one, parts in zip(settings, bodies, strict=True):
        links = "".join(
            f'<a href="#{slug(one.name)}-{slug(part.title)}">{inline(part.title)}</a>'
            for part in parts
        )
        body.append(
            f'<h2 id="{slug(one.name)}">{inline(one.name)}</h2><nav class="toc">{links}</nav>'
        )
        body += [html_text(text) for text in verdict.paragraphs(one)]
        body.append(html_sections(parts, slug(one.name)))
    nav = "".join(f'<a href="#{slug(one.name)}">{html.escape(one.name)}</a>' for one in settings)
    pieces = {
        "TITLE": html.escape(f"memdecay: {title[0].lower()}{title[1:]}"),
        "CSS": _resource("report.css"),
        "JS": _resource("report.js"),
        "NAV": nav,
        "BODY": "\n".join(body),
        "FOOTER": inline(provenance(settings)),
    }
    return re.sub(r"@@([A-Z]+)@@", lambda mark: pieces[mark[1]], _resource("report.html"))


def provenance(settings: Sequence[Findings]) -> str:
    """Return when and with what the rows were made, as they say themselves."""
    dates: set[str] = set()
    commits: set[str] = set()
    dtypes: set[str] = set()
    versions: dict[str, set[str]] = {}
    for one in settings:
        dates |= {str(date)[:10] for date in one.rows["date"]}
        commits |= {str(commit)[:10] for commit in one.rows["commit"] if commit}
        dtypes |= set(one.rows["dtype"])
        for text in one.rows["versions"].unique():
            for name, version in _versions(text).items():
                versions.setdefault(name, set()).add(version)
    said = [
        f"Rows of {listed(sorted(dates)) if len(dates) < 3 else f'{min(dates)} to {max(dates)}'}"
    ]
    if commits:
        said.append(f"commit{'s' * (len(commits) > 1)} {', '.join(sorted(commits))}")
    said.append(", ".join(sorted(dtypes)))
    said += [f"{name} {', '.join(sorted(found))}" for name, found in sorted(versions.items())]
    return " · ".join(said) + "."


def _overview(settings: Sequence[Findings]) -> list[Section]:
    groups = [g for g in verdict.RIVALS if any(verdict.rivals(one, g) for one in settings)]
    counted = [
        verdict.counts(settings, group, by) for group in groups for by in ("recall", "logprob")
    ]
    found = [Section("By setting and region", counted)]
    regions = [(NON_SYSTEM, "outside the system region"), ("system", "in the system region")]
    regions += [(region, f"`{region}` facts") for region in tables.REGIONS if region != "system"]
    for group in groups:
        shown = regions if group == "peer" else regions[:2]
        blocks = [
            verdict.standing(settings, group, region, f"`{BASE}` minus each, {where}")
            for region, where in shown
        ]
        found.append(Section(f"Every setting against the {verdict.RIVALS[group][1]}", blocks))
    pictures = (
        Picture("Fig. 1. Where the policy sits", figures.schematic()),
        Picture(
            "Fig. 2. Retention scores over time, equation (4)",
            figures.trajectories(),
            "The default profile. The `tool_out` token is attended to once, at step 40; the dotted "
            "line is what its score would have been.",
        ),
    )
    return [*found, Section("How it works", pictures)]


def _against(findings: Findings) -> _Blocks:
    groups = [group for group in verdict.RIVALS if verdict.rivals(findings, group)]
    found = [verdict.regions(findings, group) for group in groups]
    return [table for table in found if table.rows]


def _lifetimes(findings: Findings) -> _Blocks:
    if not findings.curves:
        return []
    note = "Dots are measured, the larger the more often; lines are the fits of equation (6)."
    picture = Picture(
        "Fig. 3. Attention per token by region and age", figures.measured(findings), note
    )
    blocks: _Blocks = [tables.half_lives(findings), picture]
    share = findings.about.get("straddle_share")
    if isinstance(share, int | float):
        blocks.append(
            f"{share:.0%} of the 16-token pages straddle a region boundary (the paper: 35% on its "
            f"short tier, 17% on its long one)."
        )
    return blocks


def _recall(findings: Findings, groups: Sequence[str], title: str) -> _Blocks:
    if not findings.members(*groups):
        return []
    blocks: _Blocks = [Picture(title, figures.recall(findings, groups))]
    blocks += [tables.recall(findings, budget, groups, title) for budget in findings.budgets]
    blocks += [tables.kinds(findings, budget, groups) for budget in findings.budgets]
    return blocks


def _peers(findings: Findings) -> _Blocks:
    if not findings.members("peer"):
        return []
    blocks = _recall(findings, ("peer",), "Peers beside the policy of the paper")
    blocks.insert(
        0,
        "Peers run from their own packages, on the same tokens and with the same questions. They "
        "are asked for the same budget; `kept` says what they kept of it. Most keep other tokens "
        "in every head, which whole pages in every layer cannot.",
    )
    return blocks


def _signs(findings: Findings) -> _Blocks:
    groups = ("paper", "policy", "peer")
    found = [
        tables.signs(findings, budget, region, groups)
        for region in (NON_SYSTEM, "system")
        for budget in findings.budgets
    ]
    return [table for table in found if table.rows]


def _ablation(findings: Findings) -> _Blocks:
    names = [name for name in findings.members("ablation") if name != BASE]
    if not names:
        return []
    counts = [findings.changed(name, *findings.budgets) for name in names]
    rows, kept, sets, recall = (
        sum(count[key] for count in counts) for key in ("rows", "kept", "sets", "recall")
    )
    said = (
        f"Of {rows:,} rows, {kept} differ from `{BASE}` in the number of kept tokens and {recall} "
        f"in the outcome (the paper: 4 and 1 of 576)."
    )
    if findings.rows["keep_digest"].astype(bool).any():
        said += f" {sets} had another keep set."
    return [said, tables.variants(findings, "ablation", "Attention weight and pins")]


def _sweeps(findings: Findings) -> _Blocks:
    blocks: _Blocks = []
    picture = figures.sweeps(findings)
    if picture:
        note = f"The bold value is that of `{BASE}`; everything else is held fixed."
        blocks.append(Picture("Recall outside the system region", picture, note))
    if findings.members("sweep"):
        blocks.append(tables.variants(findings, "sweep", "One parameter at a time"))
    return blocks


def _group(findings: Findings, group: str, title: str) -> _Blocks:
    return [tables.variants(findings, group, title)] if findings.members(group) else []


def _counting(findings: Findings) -> _Blocks:
    lines = tables.missing(findings)
    episodes = len(findings.rows[["scenario", "variant"]].drop_duplicates())
    whole = f"Every condition that was run was asked in all {plural(episodes, 'episode')}."
    said = [*(lines or [whole]), tables.groups_not_run(findings)]
    return [tables.counting(findings), " ".join(filter(None, said))]


def _versions(text: str) -> dict[str, str]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        str(name): str(version)
        for name, version in found.items()
        if version and name != "episode"  # a digest, which peers keep there
    }


def _has_rows(folder: Path, kinds: Sequence[str]) -> bool:
    return any(any(folder.glob(f"{kind}/*.parquet")) for kind in kinds)


def _setting_order(name: str) -> tuple[Any, ...]:
    """Sort models by the sizes in their names, and short before long."""
    model, _, tier = name.rpartition("-")
    words = re.split(r"(\d+(?:\.\d+)?)", model)
    numbers = [float(word) if index % 2 else word for index, word in enumerate(words)]
    return (numbers, tier != "short", tier)


def _resource(name: str) -> str:
    return (resources.files("memdecay.study") / "report_page" / name).read_text("utf-8")
