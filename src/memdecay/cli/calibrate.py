"""`memdecay calibrate`: measure regions' lifetimes and evidence heads, and write a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from memdecay.cli import _look, _options, _terminal
from memdecay.errors import MemDecayError
from memdecay.provenance import commit, versions

if TYPE_CHECKING:
    from memdecay.calibration.curves import Curves
    from memdecay.calibration.evidence import Watched
    from memdecay.calibration.fit import Fit
    from memdecay.calibration.player import Script
    from memdecay.study.scenario import Episode

EXAMPLE = "memdecay calibrate short --model smollm2 -o profile.yaml --figure lifetimes.svg"


def calibrate(
    traces: Annotated[
        list[str],
        typer.Argument(
            help="Trace files, folders of them, scenario files (.yaml), or short and long for the "
            "built-in episodes."
        ),
    ],
    model: _options.Model = "smollm2",
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")] = Path(
        "profile.yaml"
    ),
    burst: Annotated[
        int, typer.Option(min=0, help="Decode steps that are observed after each trace.")
    ] = 48,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Cut each trace before the turn that passes this many tokens."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the curves here: .svg, .png or .pdf.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            "--work",
            help="Folder of what was measured, from which a run that was ended goes on; beside "
            "the profile if not given.",
        ),
    ] = None,
    no_heads: Annotated[
        bool,
        typer.Option("--no-heads", help="Do not look for evidence heads."),
    ] = False,
    retriever: _options.Retrievers = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Priorities, pins and defaults are this profile's."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals' resampling.")] = 0,
    as_json: _options.Json = False,
) -> None:
    """Measure how long each region is attended to and which heads tell what will be asked.

    Traces are played with nothing evicted; at every decode step the attention is summed by region
    and age. A half-life is the slope of its logarithm, with a 95% interval over traces or, for
    episodes, over scenarios. A region with too little data keeps its default. Episodes are read
    once more with every head watched, and the heads that rank their facts best go into the profile
    too, for the policies that go by such heads. `memdecay run` takes the profile with --profile.
    """
    from memdecay.calibration.extras import require
    from memdecay.calibration.measure import check_labels
    from memdecay.cli._scripts import episodes, scripts

    require("statsmodels", "pyarrow", *(["matplotlib"] if figure else []))
    _terminal.check_output(output, "--output")
    _terminal.check_output(figure, "--figure")
    if figure is not None:
        from memdecay.calibration.figure import check_figure

        check_figure(figure, "--figure")
    base = _options.profile(profile)
    found, notes = scripts(traces, retriever or ())
    for script in found:
        check_labels(script, burst)
    asked = {} if no_heads else episodes(traces)
    if not asked and not no_heads:
        notes.append(
            "Evidence heads were not looked for: they need episodes with known answers (short, "
            "long or a scenario file), and traces have none."
        )
    folder = work or output.with_name(f"{output.stem}.curves")
    with _terminal.results(as_json):
        curves, watched, remarks = _measure(
            found, asked, model, dtype, folder, burst=burst, max_tokens=max_tokens, base=base
        )
        result = _finish(curves, watched, output, figure, base=base, seed=seed)
    result["folder"] = str(folder)
    result["notes"] = [*result["notes"], *remarks, *notes]
    if as_json:
        _terminal.print_json(result)
    else:
        _show(result)


def _measure(
    found: Sequence[Script],
    asked: Mapping[str, Episode],
    name: str,
    dtype: str,
    folder: Path,
    *,
    burst: int,
    max_tokens: int | None,
    base: Any,
) -> tuple[list[Curves], list[Watched], list[str]]:
    """Play what is not measured yet; return curves, what heads saw, and notes on what was left."""
    from memdecay.calibration.measure import count_tokens, measure, work
    from memdecay.calibration.profile import check_profile
    from memdecay.cli._scripts import cut
    from memdecay.engine import load_model

    with _terminal.progress() as progress:
        loading = progress.add_task(f"loading {escape(name)}", total=None)
        model, tokenizer = load_model(name, dtype)
        check_profile(base, tokenizer)
        parts = [cut(script, max_tokens, tokenizer) for script in found]
        lengths = {script.name: count_tokens(tokenizer, script) + burst for script, _ in parts}
        total = sum(work(tokenizer, script, burst) for script, _ in parts)
        progress.remove_task(loading)
        many = f"{len(parts)} trace{'s' * (len(parts) != 1)}"
        task = progress.add_task(f"measuring {many}", total=total)
        curves = measure(
            model,
            tokenizer,
            [script for script, _ in parts],
            folder=folder,
            burst=burst,
            provenance={"versions": versions(), "commit": commit()},
            progress=lambda done: progress.advance(task, done),
        )
        notes = [note for _, note in parts if note]
        shortened = [script.name for script, note in parts if note and script.name in asked]
        whole = {name: one for name, one in asked.items() if name not in shortened}
        if shortened:
            notes.append(
                f"{', '.join(shortened)}: cut by --max-tokens, so evidence heads are not chosen on "
                f"{'it' if len(shortened) == 1 else 'them'}."
            )
        many = f"{len(whole)} episode{'s' * (len(whole) != 1)}"
        # Each is read once and repeated once.
        total = 2 * sum(lengths[name] for name in whole)
        task = progress.add_task(f"watching heads on {many}", total=total, visible=bool(whole))
        watched = _watched(
            model, tokenizer, whole, folder / "heads", lambda done: progress.advance(task, done)
        )
    blind = [name for name, one in watched.items() if not one.usable]
    if blind:
        notes.append(
            f"{', '.join(blind)}: no fact is among the tokens that count, so evidence heads are "
            f"not chosen on {'it' if len(blind) == 1 else 'them'}."
        )
    trained = getattr(model.config, "max_position_embeddings", None)
    beyond = [script for script, length in lengths.items() if trained and length > trained]
    if beyond:
        notes.append(
            f"{', '.join(beyond)}: longer than the {trained:,} tokens that {name} was trained for; "
            f"how it attends there is not to be trusted."
        )
    return curves, [one for one in watched.values() if one.usable], notes


def _watched(
    model: Any,
    tokenizer: Any,
    episodes: Mapping[str, Episode],
    folder: Path,
    progress: Callable[[int], None],
) -> dict[str, Watched]:
    """Watch every head on what was not watched yet."""
    if not episodes:
        return {}
    from memdecay.study.watching import watch_all

    return watch_all(model, tokenizer, episodes, folder=folder, progress=progress)


def _finish(
    curves: Sequence[Curves],
    watched: Sequence[Watched],
    output: Path,
    figure: Path | None,
    *,
    base: Any,
    seed: int,
) -> dict[str, Any]:
    """Fit, choose, write the profile and the figure, and return what `--json` prints."""
    from memdecay.calibration.evidence import measured as heads_of
    from memdecay.calibration.fit import fit
    from memdecay.calibration.profile import calibrated

    fits = fit(curves, seed=seed)
    if not any(one.measured for one in fits.values()):
        steps = sum(one.steps for one in curves)
        raise MemDecayError(
            f"No region has enough data: {steps} decode steps were observed, but a region needs "
            f"ages in at least three buckets of {curves[0].bucket} steps; raise --burst or give "
            f"longer traces."
        )
    measured = curves[0].meta["settings"]
    clusters = list(dict.fromkeys(one.cluster for one in curves))
    origin = {
        "model": measured["model"],
        "tokenizer": measured["tokenizer"],
        "dtype": measured["dtype"],
        "clock": measured["clock"],
        "burst": measured["burst"],
        "traces": [one.name for one in curves],
        "clusters": clusters,
        "decode_steps": sum(one.steps for one in curves),
        "date": date.today().isoformat(),
        **_terminal.provenance(),
        "seed": seed,
    }
    found: dict[str, Any] | None = None
    if watched:
        heads, about = heads_of(watched)
        base = base.with_evidence(heads)
        found = {**about, "heads": {name: len(ones) for name, ones in heads.items()}}
    else:
        about = base.provenance.get("evidence")
    known = {} if about is None else {"evidence": about}
    made = calibrated(fits, base=base, provenance={**origin, **known})
    made.save(output)
    if figure is not None:
        from memdecay.calibration.figure import save_figure

        count = f"{len(curves)} trace{'s' * (len(curves) != 1)}"
        title = f"{Path(measured['model']).stem}, {count}: attention by region and age"
        save_figure(figure, curves, fits, title=title)
    regions = {name: _region(name, fits, made) for name in made.names}
    return {
        **origin,
        "regions": regions,
        "evidence": found,
        "profile": str(output),
        "figure": None if figure is None else str(figure),
        "notes": [one["status"] for one in regions.values() if one["status"] != "measured"],
    }


def _region(name: str, fits: Mapping[str, Fit], profile: Any) -> dict[str, Any]:
    """Return what was found for a region, and what the profile has now."""
    policy = profile.regions[name]
    one = fits.get(name)
    found = one.to_dict() if one else {"status": f"{name} was not among what was measured"}
    kept = "inf" if policy.decay_rate == 0 else float(f"{policy.half_life:.12g}")
    source = "measured" if one and one.measured else "default"
    if source == "default":
        found["status"] += f", so it keeps its half-life of {float(kept):g} steps"
    return {**found, "source": source, "profile_half_life": kept}


def _show(result: Mapping[str, Any]) -> None:
    from memdecay.calibration.figure import steps_text

    console = _terminal.out()
    console.print(
        f"\n[bold]memdecay calibrate[/]: {escape(result['model'])}, {len(result['traces'])} traces "
        f"in {len(result['clusters'])} clusters, {result['decode_steps']:,} decode steps\n"
    )
    table = _look.titled("Half-lives in decode steps")
    for column in ("region", "half-life", "95% interval", "R²", "observations", "from"):
        table.add_column(column, justify="left" if column in ("region", "from") else "right")
    for name, one in result["regions"].items():
        interval = r2 = "-"
        if one["source"] == "measured":
            r2 = f"{one['r2']:.2f}" if one["r2"] is not None else "-"
            if one["low"] is not None:
                interval = f"{steps_text(float(one['low']))} to {steps_text(float(one['high']))}"
        table.add_row(
            Text(name, style=_look.colour(name)),
            steps_text(float(one["profile_half_life"])),
            interval,
            r2,
            f"{one.get('observations', 0):,}",
            one["source"],
        )
    console.print(table)
    if result["evidence"] is not None:
        console.print()
        console.print(_heads(result["evidence"]))
    for note in result["notes"]:
        console.print(Text(f"\nNote: {note}", style="yellow"))
    drawn = (
        f", the curves are drawn in [bold]{escape(result['figure'])}[/]" if result["figure"] else ""
    )
    console.print(f"\nThe profile is in [bold]{escape(result['profile'])}[/]{drawn}.")


def _heads(found: Mapping[str, Any]) -> Any:
    """Return the table of evidence heads: how well they tell what is needed from the rest."""
    clusters = len(found["clusters"])
    table = _look.titled(f"Evidence heads, chosen on {found['episodes']} episodes")
    for column in ("set", "heads", "measure", "all scenarios", "those left out"):
        left = column in ("set", "measure")
        table.add_column(column, justify="left" if left else "right")
    for name, count in found["heads"].items():
        if name == "recall":
            what, reached, apart = "reciprocal rank", found["mrr"], found["mrr_held_out"]
        else:
            what, reached, apart = "AUC", found["auc"][name], found["auc_held_out"][name]
        left_out = "-" if apart is None else f"{apart:.3f}"
        table.add_row(name, str(count), what, f"{reached:.3f}", left_out)
    if clusters < 2:
        table.caption = "A single scenario: nothing is left out to see whether the heads are good."
    return table
