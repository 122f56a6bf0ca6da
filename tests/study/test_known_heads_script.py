"""benchmarks/known_heads.py: from what was watched to a file that caches find by shape."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from memdecay.calibration.evidence import Watched, measured
from memdecay.calibration.recall import Asked
from memdecay.engine import known
from memdecay.engine.known import known_for, known_models
from memdecay.evidence import SETS
from memdecay.study.watching import to_bytes
from study.study_tiny import small

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "known_heads.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("known_heads", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "load_model", lambda name, dtype: small("llama"))
    known_models.cache_clear()
    yield module
    known_models.cache_clear()


def watched(cluster: str, seed: int) -> Watched:
    """Two facts at which one head of the tiny model looked."""
    config = small("llama")[0].config
    dice = torch.Generator().manual_seed(seed)
    shape = (2, config.num_hidden_layers, config.num_attention_heads, 80)
    peaks = torch.rand(shape, generator=dice) * 0.1
    needed = torch.zeros(80, dtype=torch.bool)
    needed[20:25] = needed[50:54] = True
    peaks[:, 1, 2, needed] += 0.5
    counted = torch.ones(80, dtype=torch.bool)
    counted[:4] = False
    claims = torch.rand(*shape[1:3], 5, generator=dice)
    claims[1, 2, 3] += 1
    asked = Asked(cluster, claims.half(), torch.arange(5) == 3)
    return Watched(cluster, peaks.half(), needed, counted, (asked,))


def test_it_writes_what_a_cache_finds(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    episodes = []
    for number, name in enumerate(("smollm2-short", "smollm2-long")):
        folder = tmp_path / name / "heads"
        folder.mkdir(parents=True)
        for seed, cluster in enumerate(("ferry", "mill")):
            one = watched(cluster, 10 * number + seed)
            episodes.append(one)
            (folder / f"{cluster}-0.safetensors").write_bytes(to_bytes(one))
    out = tmp_path / "profiles" / "tiny.yaml"
    out.parent.mkdir()
    arguments = ["smollm2-short", "smollm2-long", "--runs", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["known_heads.py", *arguments])
    script.main()
    said = capsys.readouterr().out
    assert all(f"smollm2-135m, {use}: " in said for use in SETS) and str(out) in said
    monkeypatch.setattr(known.resources, "files", lambda package: tmp_path)
    found = known_for(small("llama")[0].config)
    assert found is not None and found.name == "tiny"
    heads, about = measured(episodes)
    assert dict(found.evidence) == heads and set(heads) == set(SETS)
    assert all((1, 2) in {(one.layer, one.head) for one in ones} for ones in heads.values())
    assert found.about["episodes"] == {"smollm2-short": 2, "smollm2-long": 2}
    assert found.about["auc_held_out"] == about["auc_held_out"]
    assert found.about["versions"]["torch"] == torch.__version__ and "commit" in found.about
    lines = out.read_text().splitlines()
    assert sum(line.startswith("  - {layer: ") for line in lines) == sum(map(len, heads.values()))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["smollm2-short", "qwen0.5b-short"], "but must be of one model."),
        (["smollm2-short"], "has no heads/*.safetensors."),
        (["smollm3"], "setting is 'smollm3'"),
    ],
)
def test_mistakes_are_one_sentence(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["known_heads.py", *settings, "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
