"""The picture of a calibration: attention by region and age, as in the paper's Fig. 3."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memdecay.calibration.curves import Curves, bucket_ages, stack
from memdecay.calibration.fit import Fit
from memdecay.errors import StudyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png", ".pdf")

# Colour, marker and dashes all tell regions apart, so that print and any eye can do without one.
_LOOKS: dict[str, tuple[str, str, str]] = {
    "system": ("#3a66d6", "o", "-"),
    "plan": ("#9a63dd", "P", "--"),
    "user": ("#12a5b0", "s", "-."),
    "tool_in": ("#c4930a", "v", ":"),
    "tool_out": ("#e8703a", "D", "--"),
    "retrieval": ("#2f8a3a", "^", "-"),
    "scratchpad": ("#7a818e", "X", ":"),
}
_OTHER = ("#cf4f8c", "*", "-")


def draw(
    axes: Axes,
    curves: Sequence[Curves],
    fits: Mapping[str, Fit],
    *,
    title: str = "",
) -> None:
    """Draw mean mass per token by age, one curve a region, and the fitted lines (mutates `axes`).

    Args:
        axes: where to.
        curves: one for each trace.
        fits: region -> fit of these curves; regions without one are not drawn.
        title: above the picture.
    """
    names, total, count = stack(curves)
    mass, number = total.sum(0), count.sum(0)
    ages = bucket_ages(mass.shape[1], curves[0].bucket)
    measured = [name for name in names if name in fits and fits[name].measured]
    for name in sorted(measured, key=lambda name: -fits[name].half_life):
        row, one = names.index(name), fits[name]
        colour, marker, dashes = _LOOKS.get(name, _OTHER)
        used = mass[row] > 0
        age, mean = ages[used], mass[row][used] / number[row][used]
        # Points stand for observations: the size of a marker says how many, as the fit weighs them.
        share = np.sqrt(number[row][used] / number[row].max())
        axes.scatter(age, mean, s=4 + 18 * share, c=colour, marker=marker, alpha=0.55, linewidths=0)
        axes.plot(
            age[[0, -1]],
            np.exp(one.intercept + one.slope * age[[0, -1]]),
            color=colour,
            linestyle=dashes,
            linewidth=1.6,
            marker=marker,
            markersize=5,
            label=f"{name}: {half_life_text(one)}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("age of the token (decode steps)")
    axes.set_ylabel("mean attention mass per token")
    axes.grid(True, which="major", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    if measured:
        axes.legend(
            title="half-life in steps [95%]",
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            frameon=False,
            fontsize=8,
            title_fontsize=8,
            alignment="left",
            handlelength=3.2,
        )


def half_life_text(one: Fit) -> str:
    """Return a half-life with its interval, as `41 [38, 47]`."""
    if not one.measured:
        return "not measured"
    text = steps_text(one.half_life)
    if math.isnan(one.low):
        return text
    return f"{text} [{steps_text(one.low)}, {steps_text(one.high)}]"


def steps_text(steps: float) -> str:
    """Return a number of steps with three digits at most before rounding, `inf` as it is."""
    if math.isinf(steps):
        return "inf"
    return f"{steps:,.0f}" if steps >= 100 else f"{steps:.1f}" if steps >= 10 else f"{steps:.2f}"


def check_figure(path: Path, option: str = "figure") -> None:
    """Refuse a picture of a kind that is not written.

    Raises:
        StudyError: the name ends otherwise.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise StudyError(f"{option} is '{path}', but its name must end in {', '.join(SUFFIXES)}.")


def save_figure(
    path: str | os.PathLike[str],
    curves: Sequence[Curves],
    fits: Mapping[str, Fit],
    *,
    title: str = "",
) -> None:
    """Write the picture as SVG, PNG or PDF, by the name's ending; whole or not at all.

    Raises:
        StudyError: the name ends otherwise, or the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = Path(path)
    check_figure(target)
    draft = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    # Text stays text in an SVG, and the same curves give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memdecay"}):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot(), curves, fits, title=title)
        kind = target.suffix.lower().removeprefix(".")
        try:
            metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
            figure.savefig(draft, format=kind, dpi=160, metadata=metadata, facecolor="white")
            os.replace(draft, target)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StudyError(f"The figure '{target}' cannot be written: {reason}.") from None
        finally:
            draft.unlink(missing_ok=True)
