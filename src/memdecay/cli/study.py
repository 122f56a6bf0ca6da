"""`memdecay study`: run the paper's study, and what goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memdecay.calibration.extras import require
from memdecay.cli import _terminal

if TYPE_CHECKING:
    from memdecay.study.settings import Setting
    from memdecay.study.workers import Here, Processes, Ray

NAMED = (
    "quick, smollm2-short, smollm2-long, qwen0.5b-short, qwen0.5b-long, qwen1.5b-short or "
    "qwen1.5b-long; another name makes a setting of your own, with --model and --tier"
)
_SettingName = Annotated[str, typer.Option("--setting", help=f"{NAMED}.")]
_Model = Annotated[
    str | None, typer.Option("--model", help="A folder, a GGUF file, a hub name, or smollm2.")
]
_Tier = Annotated[str | None, typer.Option("--tier", help="short or long.")]
_Dtype = Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32.")]
_Scenario = Annotated[
    list[str] | None,
    typer.Option("--scenario", help="A scenario by name or YAML file; repeat for more."),
]
_Variant = Annotated[
    list[int] | None, typer.Option("--variant", help="0, 1 or 2; repeat for more. All if left out.")
]
_Jobs = Annotated[
    int | None, typer.Option("--jobs", help="Processes of one thread each; one a core if left out.")
]
_Ray = Annotated[
    str | None, typer.Option("--ray", help="Spread over this Ray cluster; 'local' starts one.")
]
_Out = Annotated[Path, typer.Option("--out", help="Folder of runs; this one gets its own in it.")]

RUN_EXAMPLE = "memdecay study run --setting quick"


def run(
    setting: _SettingName = "quick",
    model: _Model = None,
    tier: _Tier = None,
    dtype: _Dtype = None,
    scenario: _Scenario = None,
    variant: _Variant = None,
    groups: Annotated[
        str | None,
        typer.Option("--groups", help="Of paper, policy, control, ablation, sweep, noise, terms."),
    ] = None,
    out: _Out = Path("runs"),
    jobs: _Jobs = None,
    ray: _Ray = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where the rows are, as JSON.")
    ] = False,
) -> None:
    """Evict the study's episodes by every policy and ask about the facts planted in them.

    Lifetimes are measured first, and each scenario is evicted with the rates of the others. Rows
    are written episode by episode: a run that was ended in any way goes on where it was.
    `memdecay study report` makes tables and pictures of them.
    """
    require("pyarrow", "statsmodels", "scipy", "pandas")
    with _terminal.results(as_json):
        from memdecay.errors import StudyError
        from memdecay.study.run import episodes_of, run_setting

        chosen = chosen_setting(setting, model, tier, dtype, scenario, variant, groups)
        count = len(episodes_of(chosen))
        if out.exists() and not out.is_dir():
            raise StudyError(f"--out is '{out}', but that is a file; it must be a folder of runs.")
        workers = chosen_workers(jobs, ray, count)
        with _terminal.progress() as bar:
            lines = {
                "measure": bar.add_task(f"{chosen.name}: measuring attention", total=count),
                "watch": bar.add_task(f"{chosen.name}: watching heads", total=count),
                "ask": bar.add_task(f"{chosen.name}: evicting and asking", total=count),
                "overhead": bar.add_task(f"{chosen.name}: timing", total=1),
            }
            try:
                folder = run_setting(
                    chosen,
                    out,
                    workers,
                    advance=lambda kind, share: bar.advance(lines[kind], share),
                )
            except KeyboardInterrupt:
                _terminal.err().print("What is done stays; the same command goes on from there.")
                raise
    if as_json:
        _terminal.print_json({"setting": chosen.name, "folder": str(folder), "episodes": count})
    else:
        _terminal.out().print(
            f"The rows are in {folder}. Next: memdecay study report {out} --setting {chosen.name} "
            f"-o {out / 'report'}",
            soft_wrap=True,
        )


EXPORT_EXAMPLE = "memdecay study export --setting quick -o episodes.jsonl"


def export(
    output: Annotated[Path, typer.Option("-o", "--output", help="JSON Lines file to write.")],
    setting: _SettingName = "quick",
    model: _Model = None,
    tier: _Tier = None,
    dtype: _Dtype = None,
    scenario: _Scenario = None,
    variant: _Variant = None,
    jobs: _Jobs = None,
) -> None:
    """Write the episodes as token ids, so that other libraries can be asked the same (peers/)."""
    require("pyarrow", "statsmodels", "scipy", "pandas")
    import json

    _terminal.check_output(output, "--output")
    with _terminal.results(as_json=False):
        from memdecay.study import run as study

        chosen = chosen_setting(setting, model, tier, dtype, scenario, variant, None)
        count = len(study.episodes_of(chosen))
        with _terminal.progress() as bar:
            line = bar.add_task(f"{chosen.name}: reading episodes", total=count)
            made = study.export(
                chosen,
                chosen_workers(jobs, None, count),
                advance=lambda kind, share: bar.advance(line, share),
            )
    _terminal.write_file(output, "".join(json.dumps(one) + "\n" for one in made))
    _terminal.out().print(f"{len(made)} episodes are in {output}.", soft_wrap=True)


EPISODES_EXAMPLE = "memdecay study episodes --tier short"


def episodes(
    scenarios: Annotated[
        list[str] | None, typer.Argument(help="Names or YAML files; all of the package if none.")
    ] = None,
    tier: Annotated[str, typer.Option("--tier", help="short or long.")] = "short",
    model: Annotated[str, typer.Option("--model", help="Whose tokenizer counts.")] = "smollm2",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check scenarios, and list their episodes: tokens, facts, and pages that straddle regions."""
    require("pyarrow", "statsmodels", "scipy", "pandas")
    with _terminal.results(as_json):
        from memdecay.engine import load_model
        from memdecay.study.episode_rows import straddle_share
        from memdecay.study.recording import regions_of
        from memdecay.study.scenario import load_episodes

        found = load_episodes(tier, scenarios or None)
        _, tokenizer = load_model(model)
        listed: list[dict[str, Any]] = []
        for episode in found:
            regions = regions_of(tokenizer, episode)
            listed.append(
                {
                    "episode": episode.name,
                    "tier": tier,
                    "stages": len(episode.stages),
                    "tokens": len(regions),
                    "straddle_share": round(straddle_share(regions), 4),
                    "facts": {fact.region: fact.value for fact in episode.facts},
                    "kinds": {fact.region: fact.kind for fact in episode.facts},
                }
            )
    mean = sum(one["straddle_share"] for one in listed) / len(listed)
    if as_json:
        _terminal.print_json({"episodes": listed, "mean_straddle_share": round(mean, 4)})
        return
    from rich.table import Table

    table = Table(title=f"{len(listed)} episodes, {tier} tier")
    for heading in ("episode", "stages", "tokens", "straddle"):
        table.add_column(heading, justify="left" if heading == "episode" else "right")
    for heading in ("system", "user", "tool_out", "retrieval"):
        table.add_column(heading, overflow="fold")
    for one in listed:
        table.add_row(
            one["episode"],
            str(one["stages"]),
            str(one["tokens"]),
            f"{one['straddle_share']:.0%}",
            *one["facts"].values(),
        )
    _terminal.out().print(table)
    _terminal.out().print(f"Pages of 16 that straddle regions, on average: {mean:.0%}.")


def chosen_setting(
    name: str,
    model: str | None,
    tier: str | None,
    dtype: str | None,
    scenario: list[str] | None,
    variant: list[int] | None,
    groups: str | None,
) -> Setting:
    """Return the setting that the options of a command ask for.

    Raises:
        StudyError: there is no such setting.
    """
    from memdecay.errors import StudyError
    from memdecay.study.run import with_changes
    from memdecay.study.settings import SETTINGS, Setting, get_setting

    changes: dict[str, Any] = {
        "dtype": dtype,
        "scenarios": tuple(scenario) if scenario else None,
        "variants": tuple(variant) if variant else None,
        "groups": _names(groups),
    }
    if name in SETTINGS or model is None or tier is None:
        base = get_setting(name)
        if tier not in (None, base.tier):
            raise StudyError(
                f"tier is {tier!r}, but setting {name!r} is of the {base.tier} tier; give another "
                f"--setting NAME."
            )
        if model is not None and Path(model).name != Path(base.model).name:
            # The same file may lie elsewhere; anything else is called what it is.
            changes["model_name"] = Path(model).name
        return with_changes(base, model=model, **changes)
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise StudyError(f"setting is {name!r}, but it must be letters, digits, '-', '_' and '.'.")
    return with_changes(Setting(name, model, Path(model).name, tier), **changes)


def _names(groups: str | None) -> tuple[str, ...] | None:
    from memdecay.errors import StudyError

    if groups is None:
        return None
    found = tuple(name.strip() for name in groups.split(","))
    if not all(found):
        raise StudyError(
            f"--groups is {groups!r}, but it must be names with commas between, such as "
            f"paper,ablation."
        )
    return found


def chosen_workers(jobs: int | None, ray: str | None, tasks: int) -> Here | Processes | Ray:
    """Return who does so many tasks.

    Raises:
        StudyError: `jobs` is not at least 1, or there is no such cluster.
    """
    from memdecay.study.workers import Here, Processes, Ray, check_jobs, default_jobs

    if jobs is not None:
        check_jobs(jobs)
    if ray is not None:
        return Ray(ray)
    jobs = default_jobs(tasks) if jobs is None else jobs
    return Here() if jobs == 1 else Processes(jobs)
