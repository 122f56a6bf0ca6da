"""Write the evidence heads of a known model from what a study watched.

    python benchmarks/known_heads.py SETTING... [--runs docs/results/runs] [--out FILE]

The settings are of one model, such as `smollm2-short smollm2-long`; `RUNS/SETTING/heads` holds what
every head gave to every token of their episodes. The heads are chosen on all of them, and how good
they are is measured on scenarios left out too. The file goes to src/memdecay/profiles, where caches
find it by the model's shape.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from memdecay.calibration.evidence import measured
from memdecay.engine import load_model
from memdecay.engine.known import shape_of
from memdecay.errors import MemDecayError, StudyError
from memdecay.evidence import Evidence
from memdecay.provenance import commit, versions
from memdecay.study.settings import Setting, get_setting
from memdecay.study.watching import from_file

ROOT = Path(__file__).resolve().parents[1]
_HEADER = "Written by benchmarks/known_heads.py; docs/calibration.md says what the heads are."


def known(settings: Sequence[Setting], runs: Path) -> tuple[Evidence, dict[str, Any]]:
    """Choose the heads of a model, and say how.

    Args:
        settings: of one model.
        runs: the folder of their runs.

    Raises:
        StudyError: the settings are of several models, or nothing was watched in one of them.
    """
    models = list(dict.fromkeys(setting.model_name for setting in settings))
    if len(models) != 1:
        raise StudyError(f"The settings are of {' and '.join(models)}, but must be of one model.")
    watched, episodes = [], {}
    for setting in settings:
        files = sorted((runs / setting.name / "heads").glob("*.safetensors"))
        if not files:
            raise StudyError(f"'{runs / setting.name}' has no heads/*.safetensors.")
        watched += [from_file(file, file.stem.rpartition("-")[0]) for file in files]
        episodes[setting.name] = len(files)
    evidence, about = measured(watched)
    model, _ = load_model(settings[0].model, settings[0].dtype)
    return evidence, {
        "model": models[0],
        "shape": shape_of(model.config),
        "dtype": settings[0].dtype,
        **about,
        "episodes": episodes,
        "versions": versions(),
        "commit": commit(),
    }


def to_yaml(evidence: Evidence, provenance: dict[str, Any]) -> str:
    """Return a profile file that says nothing of regions, a head a line."""
    heads = {}
    for name, ones in evidence.items():
        heads[name] = [CommentedMap(one.to_dict()) for one in ones]
        for line in heads[name]:
            line.fa.set_flow_style()
    document = CommentedMap(evidence=heads, provenance=provenance)
    document.yaml_set_start_comment(_HEADER)
    yaml = YAML()
    yaml.width = 1_000_000
    stream = io.StringIO()
    yaml.dump(document, stream)
    return stream.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("settings", nargs="+", metavar="SETTING")
    parser.add_argument("--runs", type=Path, default=ROOT / "docs/results/runs")
    parser.add_argument("--out", type=Path, help="src/memdecay/profiles/MODEL.yaml if not given")
    given = parser.parse_args()
    try:
        evidence, about = known([get_setting(name) for name in given.settings], given.runs)
    except MemDecayError as error:
        sys.exit(f"known_heads: {error}")
    out = given.out or ROOT / "src/memdecay/profiles" / f"{about['model']}.yaml"
    out.write_text(to_yaml(evidence, about), encoding="utf-8")
    for name, ones in evidence.items():
        what, reached, apart = "AUC", about["auc"].get(name), about["auc_held_out"].get(name)
        if name == "recall":
            what, reached, apart = "reciprocal rank", about["mrr"], about["mrr_held_out"]
        print(
            f"{about['model']}, {name}: {len(ones)} heads, {what} {reached:.4f}, on scenarios "
            f"left out {apart:.4f}"
        )
    print(f"Written to {out}.")


if __name__ == "__main__":
    main()
