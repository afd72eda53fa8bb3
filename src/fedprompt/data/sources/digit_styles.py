"""The six looks of the embedded set: pure functions of (digit, example, material, generator) that paint 64 pixels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from fedprompt.data.sources.digit_glyphs import CLEAR_FONTS, FONTS, Material, font_glyph

SIDE = 64
Paint = Callable[[int, int, Material, np.random.Generator], np.ndarray]  # digit, number of the example -> (64, 64, 3)


def mnist(digit: int, example: int, material: Material, generator: np.random.Generator) -> np.ndarray:
    """Handwriting, white on black."""
    ink = posed(material.mnist[digit][example], generator, turn=10, scale=(0.75, 1.0))
    return _finished(255 * ink[..., None] * np.ones(3), generator, noise=6)


def optical(digit: int, example: int, material: Material, generator: np.random.Generator) -> np.ndarray:
    """Scans of eight by eight pixels, dark and blocky on grey paper."""
    blocks = np.kron(material.optical[digit][example], np.ones((8, 8), dtype=np.float32))
    ink = posed(blocks, generator, turn=8, scale=(0.8, 1.05))
    paper = generator.uniform(160, 235)
    return _finished((paper - ink * generator.uniform(0.55, 0.9) * paper)[..., None] * np.ones(3), generator, noise=10)


def fonts(digit: int, example: int, material: Material, generator: np.random.Generator) -> np.ndarray:
    """Print in strong colours on a colour gradient."""
    glyph = font_glyph(FONTS[generator.integers(len(FONTS))], digit)
    ink = posed(glyph, generator, turn=25, scale=(0.55, 0.95))[..., None]
    dark, light = _colours(generator)
    if generator.random() < 0.5:
        dark, light = light, dark
    ramp = np.linspace(-1, 1, SIDE)[:, None, None] * generator.uniform(-35, 35, size=3)
    paper = light + (ramp if generator.random() < 0.5 else ramp.transpose(1, 0, 2))
    return _finished(ink * dark + (1 - ink) * paper, generator, noise=0)


def photo(digit: int, example: int, material: Material, generator: np.random.Generator) -> np.ndarray:
    """Handwriting that shifts the colours of a piece of a photograph."""
    picture = material.photographs[generator.integers(len(material.photographs))]
    side = int(generator.integers(64, 200))
    top, left = (int(generator.integers(0, extent - side)) for extent in picture.shape[:2])
    piece = Image.fromarray(picture[top : top + side, left : left + side]).resize(
        (SIDE, SIDE), Image.Resampling.BICUBIC
    )
    scene = np.asarray(piece, dtype=np.float32)
    scene = scene.mean(axis=(0, 1)) + 0.6 * (scene - scene.mean(axis=(0, 1)))  # paler, so that the digit is the subject
    ink = posed(material.mnist[digit][160 + example], generator, turn=15, scale=(0.75, 1.0))[..., None]
    strength = generator.uniform(0.75, 1.0)
    far = np.where(scene.mean() > 120, 0.0, 255.0) * np.ones(3) + generator.uniform(-60, 60, size=3)
    return _finished(scene * (1 - strength * ink) + far.clip(0, 255) * strength * ink, generator, noise=0)


def sketch(digit: int, example: int, material: Material, generator: np.random.Generator) -> np.ndarray:
    """Outlines drawn twice with an unsteady pencil, some of it rubbed out."""
    glyph = material.mnist[digit][320 + example]
    if generator.random() < 0.5:
        glyph = font_glyph(FONTS[generator.integers(len(FONTS))], digit)
    shape = posed(glyph, generator, turn=15, scale=(0.75, 1.0))
    lines = np.zeros((SIDE, SIDE), dtype=np.float32)
    for _ in range(2):
        wobbled = _wobbled(shape, generator, reach=1.8)
        solid = Image.fromarray((255 * (wobbled > 0.45)).astype(np.uint8))
        edge = np.asarray(solid.filter(ImageFilter.MaxFilter(3)), dtype=np.float32) - np.asarray(solid)
        lines = np.maximum(lines, edge / 255 * generator.uniform(0.5, 0.9))
    lines *= _clouds(generator, 6) > 0.22
    for _ in range(int(generator.integers(0, 4))):  # stray strokes
        stroke = Image.new("L", (SIDE, SIDE))
        ImageDraw.Draw(stroke).line([int(value) for value in generator.integers(0, SIDE, 4)], fill=90)
        lines = np.maximum(lines, np.asarray(stroke, dtype=np.float32) / 255)
    paper = np.array([250, 246, 235]) - 18 * _clouds(generator, 16)[..., None]
    return _finished(paper * (1 - 0.85 * lines[..., None]), generator, noise=4)


def infographic(digit: int, example: int, material: Material, generator: np.random.Generator) -> np.ndarray:
    """A light digit set from small icons on a flat dark colour, with bars of a chart beside it."""
    glyph = font_glyph(CLEAR_FONTS[generator.integers(len(CLEAR_FONTS))], digit)
    cells = int(generator.integers(14, 18))
    shape = posed(glyph, generator, turn=8, scale=(1.0, 1.25))
    grid = np.asarray(Image.fromarray(shape).resize((cells, cells), Image.Resampling.BOX))
    dark, light = _colours(generator)
    canvas = Image.new("RGB", (SIDE * 4, SIDE * 4), _rgb(dark))  # drawn large for smooth edges
    draw = ImageDraw.Draw(canvas)
    tint, faint, bright = _rgb(0.85 * dark + 0.15 * light), _rgb(0.5 * dark + 0.5 * light), _rgb(light)
    for column in np.flatnonzero(generator.random(8) < 0.5):
        height = int(generator.integers(20, 150))
        draw.rectangle([int(column) * 32 + 4, 256 - height, int(column) * 32 + 26, 256], fill=tint)
    icon = int(generator.integers(4))
    pitch = 4 * SIDE / cells
    flipped = generator.random((cells, cells)) < 0.02
    for row, column in np.ndindex(cells, cells):
        lit = bool(grid[row, column] > 0.42) != bool(flipped[row, column])
        x, y = (column + 0.5) * pitch, (row + 0.5) * pitch
        _icon(draw, icon, x, y, pitch * (0.52 if lit else 0.08), bright if lit else faint)
    return _finished(
        np.asarray(canvas.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32), generator, noise=0
    )


STYLES: dict[str, Paint] = {
    "mnist": mnist,
    "optical": optical,
    "fonts": fonts,
    "photo": photo,
    "sketch": sketch,
    "infographic": infographic,
}


def posed(glyph: np.ndarray, generator: np.random.Generator, turn: float, scale: tuple[float, float]) -> np.ndarray:
    """The glyph on a 64-pixel canvas, turned, resized and moved, but never cut off by the move alone."""
    zoom = generator.uniform(*scale)
    angle = np.deg2rad(generator.uniform(-turn, turn))
    room = (max(0.0, (1 - zoom) / 2) + 0.04) * SIDE
    move = generator.uniform(-room, room, size=2)
    source = glyph.shape[0]
    ratio = source / (SIDE * zoom)
    cosine, sine = np.cos(angle) * ratio, np.sin(angle) * ratio
    centre = np.array([SIDE / 2, SIDE / 2]) + move
    offset_x = source / 2 - cosine * centre[0] - sine * centre[1]
    offset_y = source / 2 + sine * centre[0] - cosine * centre[1]
    canvas = Image.fromarray(glyph.astype(np.float32)).transform(
        (SIDE, SIDE),
        Image.Transform.AFFINE,
        (cosine, sine, offset_x, -sine, cosine, offset_y),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(canvas, dtype=np.float32).clip(0, 1)


def _finished(pixels: np.ndarray, generator: np.random.Generator, noise: float) -> np.ndarray:
    """Grain, the same in all channels, and eight bits."""
    grain = noise * generator.standard_normal((SIDE, SIDE, 1), dtype=np.float32) if noise else 0
    return (pixels + grain).clip(0, 255).round().astype(np.uint8)


def _colours(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A dark and a light colour that differ enough to be read."""
    dark = generator.uniform(0, 110, size=3)
    light = generator.uniform(60, 255, size=3)
    light[generator.integers(3)] = 255
    return dark * 90 / max(90.0, dark.mean()), light + max(0.0, 170 - light.mean())


def _clouds(generator: np.random.Generator, cells: int) -> np.ndarray:
    """Smooth noise in [0, 1]."""
    coarse = Image.fromarray(generator.random((cells, cells), dtype=np.float32))
    return np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BILINEAR)).clip(0, 1)


def _wobbled(shape: np.ndarray, generator: np.random.Generator, reach: float) -> np.ndarray:
    """The shape with every pixel taken from a little beside, smoothly."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    rows = (rows + reach * 2 * (_clouds(generator, 8) - 0.5)).round().astype(int).clip(0, SIDE - 1)
    columns = (columns + reach * 2 * (_clouds(generator, 8) - 0.5)).round().astype(int).clip(0, SIDE - 1)
    return shape[rows, columns]


def _rgb(colour: np.ndarray) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in colour.clip(0, 255))
    return red, green, blue


def _icon(draw: ImageDraw.ImageDraw, icon: int, x: float, y: float, radius: float, colour: tuple[int, ...]) -> None:
    if icon == 0:
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)
    elif icon == 1:
        draw.rectangle([x - radius * 0.85, y - radius * 0.85, x + radius * 0.85, y + radius * 0.85], fill=colour)
    elif icon == 2:
        draw.polygon([(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)], fill=colour)
    else:
        draw.polygon([(x, y - radius), (x + radius, y + radius * 0.8), (x - radius, y + radius * 0.8)], fill=colour)
