"""An explanation as a picture, and as a page with the picture and its numbers."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

from fedprompt.errors import ConfigError, StorageError, argument, broken
from fedprompt.inference.explain import AttentionView, Explanation, Mixed
from fedprompt.report.html_elements import escape
from fedprompt.report.plot_style import GRID, INK, colour, new_figure, plot_style, png, svg

ENDINGS = (".png", ".svg", ".html")
CLASSES = 5  # shown, the likeliest first
PARTS = 8  # of a mixture that are shown
LONGEST_NAME = 26  # characters of a class or part that fit beside a bar
OVERLAY = 0.6  # of a map over the image
EVEN = 0.01  # a map whose values differ by less than this part of an even share has one colour
WITH, WITHOUT = colour(0), colour(5)
KINDS = {"patches": "patches", "cls": "CLS itself", "extra": "extra tokens", "prompts": "prompts"}
SHADES = {"patches": colour(4), "cls": "#c9ced6", "extra": colour(3), "prompts": colour(1)}


def write(explanation: Explanation, path: Path) -> Path:
    """The picture as PNG or SVG, or a page, by the ending of the path."""
    require_ending(path)
    figure = draw(explanation)
    if path.suffix.lower() == ".png":
        data = png(figure)
    else:
        drawing = svg(figure, "explain")
        data = (page(explanation, drawing) if path.suffix.lower() == ".html" else _alone(drawing)).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    return path


def require_ending(path: Path) -> None:
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(
            broken(argument("path", "--output"), f"end in {', '.join(ENDINGS)} or be a folder", str(path))
        )


def draw(explanation: Explanation) -> Figure:
    """Top: the image and attention of CLS; bottom: shares of attention, classes and the mixture."""
    with plot_style():
        figure = new_figure(12.4, 7.7)
        names = (_short(explanation.client, 40), _short(explanation.method, 40), _short(explanation.run, 60))
        title = f"{textwrap.shorten(explanation.answer, 110)}\n{' · '.join(names)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
        halves = figure.add_gridspec(2, 1, height_ratios=(1.05, 1))
        above, below = halves[0], halves[1]
        _draw_images(figure, above, explanation)
        mixtures = explanation.mixtures[:2]
        columns = below.subgridspec(
            1, 2 + max(len(mixtures), 1), width_ratios=[1, 1.15, *[1.15] * max(len(mixtures), 1)]
        )
        _draw_shares(figure.add_subplot(columns[0]), explanation)
        _draw_classes(figure.add_subplot(columns[1]), explanation)
        for number, mixed in enumerate(mixtures):
            _draw_mixture(figure.add_subplot(columns[2 + number]), mixed)
        if not mixtures and len(explanation.draws) > 1:
            _draw_draws(figure.add_subplot(columns[2]), explanation)
        elif not mixtures:
            _draw_note(figure.add_subplot(columns[2]), "Mixture", _nothing_mixed(explanation))
        figure.supxlabel("\n".join(textwrap.wrap(_sentence(explanation.changes), 150)), fontsize=10, x=0.01, ha="left")
    return figure


def _draw_images(figure: Figure, half: SubplotSpec, explanation: Explanation) -> None:
    columns = half.subgridspec(1, 4)
    axes = [figure.add_subplot(columns[place]) for place in range(4 if explanation.in_images else 2)]
    _show_image(axes[0], explanation.pixels)
    axes[0].set_title("Image")
    height, width, _ = explanation.pixels.shape
    size = explanation.size
    axes[0].set_xlabel(f"{width} × {height} pixels\nthe backbone sees {size} × {size}", fontsize=9)
    plain, prompted = explanation.plain.patches, explanation.prompted.patches
    most = float(max(plain.max(), prompted.max()))
    if not explanation.in_images:
        drawn = _draw_map(axes[1], explanation, plain, "Attention of CLS", most)
        figure.colorbar(drawn, ax=axes[1], shrink=0.75, format=_percent, label="of the attention on patches")
        note = figure.add_subplot(columns[2:])
        text = "The image tower is unchanged: the attention of CLS is the same before and after training."
        _draw_note(note, "Nothing to compare in the image", text)
        return
    _draw_map(axes[1], explanation, plain, "Without prompts" if explanation.tokens else "Without", most)
    drawn = _draw_map(
        axes[2], explanation, prompted, "With prompts" if explanation.tokens else "With changed weights", most
    )
    figure.colorbar(drawn, ax=axes[1:3], shrink=0.75, format=_percent, label="of the attention on patches")
    difference = 100 * (prompted - plain)
    far = max(float(np.abs(difference).max()), 1e-9)
    _show_image(axes[3], explanation.pixels, grey=True)
    shown = axes[3].imshow(
        difference, cmap="PuOr_r", vmin=-far, vmax=far, alpha=OVERLAY, extent=_extent(explanation.pixels)
    )
    axes[3].set_title("Difference")
    axes[3].set_xlabel(_one_colour(difference / 100), fontsize=9)
    figure.colorbar(shown, ax=axes[3], shrink=0.75, label="percentage points", format="%+.3g")


def _draw_map(axes: Axes, explanation: Explanation, patches: np.ndarray, title: str, most: float) -> Any:
    _show_image(axes, explanation.pixels, grey=True)
    drawn = axes.imshow(patches, cmap="viridis", vmin=0, vmax=most, alpha=OVERLAY, extent=_extent(explanation.pixels))
    axes.set_title(title)
    axes.set_xlabel(_one_colour(patches), fontsize=9)
    return drawn


def _one_colour(values: np.ndarray) -> str:
    """What a map without contrast says, in words; empty for all others."""
    if np.ptp(values) > EVEN / values.size:
        return ""
    return f"one colour: {_percent(float(values.mean().round(6)) + 0.0, 0)} everywhere"


def _show_image(axes: Axes, pixels: np.ndarray, grey: bool = False) -> None:
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    if grey:
        axes.imshow(pixels.mean(-1), cmap="gray", vmin=0, vmax=255)
    else:
        axes.imshow(pixels)


def _extent(pixels: np.ndarray) -> tuple[float, float, float, float]:
    return (-0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5)


def _draw_shares(axes: Axes, explanation: Explanation) -> None:
    """Attention of CLS by kind of row, as one bar with prompts and one without."""
    rows: list[tuple[str, AttentionView]] = [("without", explanation.plain)]
    if explanation.in_images:
        rows.append(("with", explanation.prompted))
    for place, (_, where) in enumerate(rows):
        start = 0.0
        for kind, name in KINDS.items():
            share = where.shares[kind]
            axes.barh(place, share, left=start, height=0.55, color=SHADES[kind], edgecolor="white", label=name)
            if share > 0.08:
                axes.text(
                    start + share / 2, place, f"{share:.0%}", ha="center", va="center", color="black", fontsize=10
                )
            start += share
    names = [name if explanation.in_images else "" for name, _ in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(rows) + 0.55)
    _percent_axis(axes, 1.0)
    present = [kind for kind in KINDS if any(where.shares[kind] > 0 for _, where in rows)]
    handles, labels = axes.get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    axes.legend(
        [known[KINDS[kind]] for kind in present],
        [KINDS[kind] for kind in present],
        loc="upper left",
        ncols=2,
        fontsize=9,
    )
    axes.set_title("Where CLS's attention goes")
    axes.set_xlabel(explanation.where)


def _draw_classes(axes: Axes, explanation: Explanation) -> None:
    top = explanation.top(min(CLASSES, len(explanation.class_names)))[::-1]
    places = np.arange(len(top))
    several = len(explanation.draws) > 1
    mean, spread = explanation.probabilities[top], explanation.draws[:, top]
    reach = np.stack([mean - spread.min(0), spread.max(0) - mean]).clip(0) if several else None
    label = f"with (range of {len(explanation.draws)} draws)" if several else "with"
    shift = 0.2 if explanation.differs else 0.0
    axes.barh(places + shift, mean, 0.38, color=WITH, xerr=reach, capsize=3, ecolor=INK, label=label)
    if explanation.differs:
        axes.barh(places - shift, explanation.plain_probabilities[top], 0.38, color=WITHOUT, label="without")
        axes.legend(loc="upper right", fontsize=9, ncols=2, borderaxespad=0.1, handlelength=1.2, columnspacing=1)
    axes.set_yticks(places, [_short(explanation.class_names[number]) for number in top])
    axes.set_ylim(-0.6, len(top) + 0.35)
    _percent_axis(axes, max(float(np.max(spread, initial=0)), float(explanation.plain_probabilities[top].max())))
    axes.set_title("Likeliest classes")
    below = textwrap.wrap(f"without: {explanation.plain_means}", 46) if explanation.differs else []
    axes.set_xlabel("\n".join(["probability", *below]), fontsize=9)


def _draw_mixture(axes: Axes, mixed: Mixed) -> None:
    order = mixed.order[:PARTS][::-1]
    shades = [colour(2) if mixed.used[part] else GRID for part in order]
    axes.barh(range(len(order)), [mixed.weights[part] for part in order], 0.7, color=shades)
    names = [
        _short(mixed.parts[part]) + (" (used)" if mixed.used[part] and not all(mixed.used) else "") for part in order
    ]
    axes.set_yticks(range(len(order)), names)
    left = len(mixed.parts) - len(order)
    axes.set_title(_short(mixed.what[:1].upper() + mixed.what[1:], 34))
    axes.set_xlabel(mixed.unit + (f"; {left} more not shown" if left else ""))
    if mixed.unit.startswith("share"):
        _percent_axis(axes, max(mixed.weights))
    axes.grid(False, axis="y")


def _draw_draws(axes: Axes, explanation: Explanation) -> None:
    """The most likely class for every draw of the prompts."""
    best = int(explanation.probabilities.argmax())
    found = explanation.draws[:PARTS, best][::-1]
    axes.barh(range(len(found)), found, 0.7, color=colour(2))
    axes.axvline(explanation.probabilities[best], color=INK, linewidth=1)
    axes.set_yticks(range(len(found)), [f"draw {number}" for number in range(len(found), 0, -1)])
    axes.set_title("Draws of the prompts")
    left = len(explanation.draws) - len(found)
    axes.set_xlabel(f"probability of {_short(explanation.class_names[best])}" + (f"; {left} more" if left else ""))
    _percent_axis(axes, float(found.max()))


def _draw_note(axes: Axes, title: str, text: str) -> None:
    axes.set_axis_off()
    axes.set_title(title)
    axes.text(0, 0.92, "\n".join(textwrap.wrap(text, 44)), va="top", transform=axes.transAxes)


def _nothing_mixed(explanation: Explanation) -> str:
    same = "changed weights" if explanation.in_images and not explanation.tokens else "prompts"
    text = f"All images of this client get the same {same}."
    if not explanation.differs:
        text = "There are no prompts: only the head is the client's own."
    elif "made for this image" in explanation.changes:
        text = "Prompts are computed from this image, not mixed from parts."
    numbers = "".join(f" {name} = {value:.3g}." for name, value in explanation.numbers.items())
    return text + numbers


def _percent_axis(axes: Axes, most: float) -> None:
    axes.set_xlim(0, max(most * 1.08, 1e-6))
    axes.xaxis.set_major_formatter(lambda value, _: _percent(value, 0))
    axes.grid(False, axis="y")


def _percent(value: float, _: object) -> str:
    return f"{100 * value:.3g} %"


def _short(name: str, longest: int = LONGEST_NAME) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _alone(drawing: str) -> str:
    """A standalone SVG drawing."""
    return drawing.replace("var(--ink)", INK).replace("var(--grid)", GRID)


def page(explanation: Explanation, drawing: str) -> str:
    """One self-contained file: the picture, and its numbers as tables."""
    safe = escape
    title = f"{explanation.client}, {explanation.method}"
    classes = "".join(
        _row(
            explanation.class_names[number], explanation.probabilities[number], explanation.plain_probabilities[number]
        )
        for number in explanation.top(len(explanation.class_names))
    )
    shares = "".join(
        _row(name, explanation.prompted.shares[kind], explanation.plain.shares[kind]) for kind, name in KINDS.items()
    )
    mixtures = "".join(_mixture_table(mixed) for mixed in explanation.mixtures)
    numbers = "".join(f"<tr><th scope=row>{safe(name)}<td>{value:.4g}" for name, value in explanation.numbers.items())
    both = "<tr><th scope=col><th scope=col>with prompts<th scope=col>without"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{safe(title)}</title>
<style>
:root {{ --ink: {INK}; --grid: {GRID}; --paper: #fff; color-scheme: light dark }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ee; --grid: #4a525c; --paper: #16191d }} }}
body {{ margin: 0 auto; padding: 1rem; max-width: 75rem; font: 1rem/1.5 system-ui, sans-serif }}
body {{ color: var(--ink); background: var(--paper) }}
figure {{ margin: 0; overflow-x: auto }} figure svg {{ width: 100%; min-width: 40rem; height: auto }}
table {{ border-collapse: collapse; margin: 1rem 0 }} caption {{ text-align: left; font-weight: bold }}
th, td {{ padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--grid); text-align: right }}
th[scope=row] {{ text-align: left; font-weight: normal }}
</style></head><body>
<h1>{safe(title)}</h1>
<p><strong>{safe(explanation.answer)}</strong></p>
<p>Run {safe(explanation.run)}, image {safe(explanation.image)}. {safe(_sentence(explanation.changes))}</p>
<figure role="img" aria-label="The image, attention of CLS with and without prompts, and the numbers of the tables">{drawing}</figure>
<table><caption>Classes</caption>{both}{classes}</table>
<p>Without: {safe(explanation.plain_means)}.</p>
<table><caption>Where CLS's attention goes ({safe(explanation.where)})</caption>{both}{shares}</table>
{mixtures}{f"<table><caption>The method's own numbers</caption>{numbers}</table>" if numbers else ""}
</body></html>
"""


def _row(name: str, first: float, second: float) -> str:
    return f"<tr><th scope=row>{escape(name)}<td>{first:.1%}<td>{second:.1%}"


def _mixture_table(mixed: Mixed) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(mixed.parts[part])}<td>{mixed.weights[part]:.4g}<td>{'used' if mixed.used[part] else ''}"
        for part in mixed.order
    )
    return f"<table><caption>{escape(mixed.what)} ({escape(mixed.unit)})</caption>{rows}</table>\n"
