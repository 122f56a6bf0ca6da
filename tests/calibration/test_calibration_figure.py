"""The figure: what is drawn is what was measured and fitted."""

from __future__ import annotations

import numpy as np
import pytest

from memdecay.calibration.curves import Curves
from memdecay.calibration.figure import check_figure, draw, half_life_text, save_figure, steps_text
from memdecay.calibration.fit import fit
from memdecay.errors import StudyError
from memdecay.regions import REGIONS


@pytest.fixture(scope="module")
def curves():
    found = []
    for cluster, rate in (("a", 0.02), ("b", 0.03)):
        made = Curves(cluster, cluster)
        age = np.arange(1, 61)
        for row in (0, 4):
            made.add(np.full(60, row), age, np.exp(-rate * (row + 1) * age))
        found.append(made)
    return found


def axes():
    from matplotlib.figure import Figure

    return Figure().add_subplot()


def test_lines_points_and_legend_are_those_of_the_fits(curves):
    fits, place = fit(curves), axes()
    draw(place, curves, fits, title="A title")
    assert place.get_yscale() == "log" and place.get_title(loc="left") == "A title"
    assert [text.get_text() for text in place.get_legend().get_texts()] == [
        f"system: {half_life_text(fits['system'])}",
        f"tool_out: {half_life_text(fits['tool_out'])}",
    ]
    for name, line, points in zip(
        ("system", "tool_out"), place.lines, place.collections, strict=True
    ):
        age, mass = line.get_data()
        assert np.allclose(np.log(mass), fits[name].intercept + fits[name].slope * age)
        row = REGIONS.index(name)
        total, count = (sum(getattr(c, what)[row] for c in curves) for what in ("total", "count"))
        used = total > 0
        drawn = points.get_offsets()
        assert np.allclose(drawn[:, 0], curves[0].ages[used])
        assert np.allclose(drawn[:, 1], (total / np.maximum(count, 1))[used])
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in place.lines}
    assert len({marker for _, marker, _ in looks}) == 2  # not by colour alone


def test_regions_without_a_fit_are_not_drawn(curves):
    fits, place = fit(curves), axes()
    draw(place, curves, {"tool_out": fits["tool_out"], "plan": fits["plan"]})
    assert len(place.lines) == 1
    nothing = axes()
    draw(nothing, curves, {})
    assert not nothing.lines and nothing.get_legend() is None


@pytest.mark.parametrize(
    ("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".PDF", b"%PDF")]
)
def test_it_is_written_whole_by_the_name_of_the_file(curves, tmp_path, suffix, start):
    path = tmp_path / f"f{suffix}"
    save_figure(path, curves, fit(curves), title="Title")
    once = path.read_bytes()
    assert once.startswith(start)
    save_figure(path, curves, fit(curves), title="Title")
    assert path.read_bytes() == once
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if suffix == ".svg":
        assert b"half-life in steps" in once  # text, for readers and searches


def test_what_cannot_be_written_is_one_sentence(curves, tmp_path):
    with pytest.raises(StudyError, match=r"--figure is 'f.gif', but its name must end in .svg"):
        check_figure(tmp_path.__class__("f.gif"), "--figure")
    with pytest.raises(StudyError, match="cannot be written: No such file"):
        save_figure(tmp_path / "no" / "f.svg", curves, fit(curves))


@pytest.mark.parametrize(
    ("steps", "text"),
    [(float("inf"), "inf"), (1234.5, "1,234"), (148.4, "148"), (99.96, "100.0"), (14.26, "14.3"),
     (2.345, "2.35")],
)  # fmt: skip
def test_steps_are_short(steps, text):
    assert steps_text(steps) == text
