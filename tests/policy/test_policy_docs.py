"""What docs/add-a-policy.md and docs/notation.md say can be pasted and works."""

from __future__ import annotations

import re
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

from memdecay.policy import available, get_policy
from memdecay.policy.registry import GROUP
from memdecay.policy.testing import CHECKS
from memdecay.regions import Profile

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_example_policy_passes_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    source, test = blocks("add-a-policy.md", "python")
    module = types.ModuleType("my_policies")
    monkeypatch.setitem(sys.modules, "my_policies", module)
    exec(compile(source, "my_policies.py", "exec"), module.__dict__)
    (toml,) = blocks("add-a-policy.md", "toml")
    name, value = re.search(r'"memdecay\.policies"\]\n(\w+) = "(.+)"', toml).groups()

    real = metadata.entry_points
    extra = metadata.EntryPoint(name=name, value=value, group=GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda **params: [*real(**params), extra])
    assert "peak" in available()
    assert get_policy("peak", fade=0.9) == module.Peak(fade=0.9)
    tests: dict[str, object] = {}
    exec(compile(test, "test_my_policies.py", "exec"), tests)
    for check in CHECKS:
        tests["test_contract"](check)  # type: ignore[operator]


def test_the_example_profile_loads(tmp_path: Path) -> None:
    (source,) = blocks("notation.md", "yaml")
    (tmp_path / "p.yaml").write_text(source)
    profile = Profile.load(tmp_path / "p.yaml")
    assert profile.regions["retrieval"].half_life == pytest.approx(300)
    assert profile.names[-1] == "notes" and profile.regions["system"].pinned


def test_the_defaults_in_notation_are_the_defaults() -> None:
    text = (DOCS / "notation.md").read_text()
    for name, region in Profile.default().regions.items():
        if not region.pinned:
            assert f"{name} {region.base_priority:g} / {region.half_life:g}" in text


def test_the_benchmark_runs() -> None:
    """Small and once: the numbers mean nothing here, only that it measures."""
    path = DOCS.parent / "benchmarks" / "policy_update.py"
    module = types.ModuleType("policy_update")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    result = module.measure("h2o", tokens=2048, repeats=1)
    assert result["tokens"] == 2048 and 0 < result["total_quarter_ms"] < 1000
