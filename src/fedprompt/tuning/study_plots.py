"""Pictures of a study: which setting matters, and what was tried."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import optuna
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from fedprompt.core.search_space import FloatRange
from fedprompt.report.plot_style import colour, new_figure, plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedprompt.tuning.outcome import Outcome

FEWEST = 4  # trials for which importance says something


def importance(outcome: Outcome) -> tuple[str, dict[str, float]]:
    """How much each setting decides on the Average at the first rung, which all trials reach, and by which measure.

    fANOVA where scikit-learn is installed, else PED-ANOVA. Nothing where all trials came out alike. A first trial whose
    values lie outside the ranges does not count.
    """
    try:
        import sklearn  # noqa: F401

        name, evaluator = "fANOVA", cast(Any, optuna.importance.FanovaImportanceEvaluator(seed=0))
    except ImportError:
        name, evaluator = "PED-ANOVA", cast(Any, optuna.importance.PedAnovaImportanceEvaluator())
    copy = optuna.create_study(direction="maximize")
    space: dict[str, Any] = {
        setting: optuna.distributions.FloatDistribution(each.low, each.high, log=each.log)
        if isinstance(each, FloatRange)
        else optuna.distributions.CategoricalDistribution(each.values)
        for setting, each in outcome.plan.space.items()
    }
    complete = [row for row in outcome.rows if row.values.keys() == space.keys()]
    for row in complete:
        copy.add_trial(optuna.trial.create_trial(params=row.values, distributions=space, value=row.first))
    if len(complete) < FEWEST or len({row.first for row in complete}) < 2:
        return name, {}
    try:
        found = optuna.importance.get_param_importances(copy, evaluator=evaluator)
    except (ValueError, RuntimeError):  # too few different values
        return name, {}
    return name, {setting: float(value) for setting, value in found.items() if math.isfinite(value)}


def importance_plot(shares: dict[str, float], measure: str) -> Figure:
    """A bar for every setting, the most important one on top."""
    with plot_style():
        figure = new_figure(5.2, 1.3 + 0.35 * len(shares))
        axes = figure.subplots()
        settings = sorted(shares, key=lambda setting: shares[setting])
        axes.barh(range(len(settings)), [shares[setting] for setting in settings], color=colour(0))
        axes.set_yticks(range(len(settings)), settings)
        axes.set_xlabel(f"importance ({measure})")
        axes.grid(axis="y", visible=False)
    return figure


def parallel_plot(outcome: Outcome) -> Figure:
    """A line for every trial through the values it tried to its Average at the first rung; the best trial is thick."""
    plan, rows = outcome.plan, outcome.rows
    settings = list(plan.space)
    with plot_style():
        figure = new_figure(max(5.2, 1.6 + 1.3 * (len(settings) + 1)), 3.8)  # letters as large as in the other picture
        axes = figure.subplots()
        figures = [row.first for row in rows]
        low, high = min(figures), max(max(figures), min(figures) + 1e-9)
        norm = Normalize(low, high)
        shades = ScalarMappable(Normalize(low, high + (high - low) / 4), "viridis")  # no yellow, pale on paper
        for row in sorted(rows, key=lambda row: row is outcome.best):
            heights = [
                _height(plan.space[setting], row.values[setting]) if setting in row.values else math.nan
                for setting in settings
            ]
            best = row is outcome.best
            axes.plot(
                range(len(settings) + 1),
                [*heights, norm(row.first)],
                color=colour(1) if best else shades.to_rgba(np.array(row.first)),
                linewidth=2.6 if best else 1.0,
                linestyle=":" if row.diverged else "-",
                alpha=1.0 if best else 0.8,
                zorder=3 if best else 2,
            )
        ends = [_ends(plan.space[setting]) for setting in settings]
        ends.append((f"{100 * low:.1f} %", f"{100 * high:.1f} %"))
        for place, (bottom, top) in enumerate(ends):
            axes.axvline(place, linewidth=0.8, color="#7f7f7f", zorder=1)
            axes.text(place, -0.04, bottom, ha="center", va="top", fontsize=9)
            axes.text(place, 1.04, top, ha="center", va="bottom", fontsize=9)
        axes.set_xticks(range(len(settings) + 1), [*map(_wrapped, settings), "Average"], fontsize=9)
        axes.tick_params(axis="x", pad=16, length=0)
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.set_ylim(-0.02, 1.02)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
    return figure


def _height(each: object, value: object) -> float:
    if isinstance(each, FloatRange):
        assert isinstance(value, int | float)
        low, high, at = (math.log(x) if each.log else x for x in (each.low, each.high, value))
        return float(np.clip((at - low) / (high - low), 0, 1))
    values = getattr(each, "values", ())
    return [repr(other) for other in values].index(repr(value)) / max(1, len(values) - 1)


def _ends(each: object) -> tuple[str, str]:
    if isinstance(each, FloatRange):
        return f"{each.low:.2g}", f"{each.high:.2g}"
    values = getattr(each, "values", ("",))
    return str(values[0]), str(values[-1])


def _wrapped(setting: str) -> str:
    section, _, name = setting.removeprefix("train.lrs.").partition(".")
    return (
        f"rate of\n{setting.removeprefix('train.lrs.')}" if setting.startswith("train.lrs.") else f"{section}\n{name}"
    )
