"""The embedded set: the styles on made-up material, and the real set when its wheels can be had."""

from __future__ import annotations

import io

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources import digits as embedded
from fedprompt.data.sources.base import Source, decode
from fedprompt.data.sources.digit_glyphs import FONTS, MEMBERS, Material, font_glyph
from fedprompt.data.sources.digit_styles import SIDE, STYLES
from fedprompt.io.files import cache_directory


def made_up_material() -> Material:
    """Digits that are rings and strokes: enough to paint every style without any wheel."""
    generator = np.random.default_rng(0)
    mnist = tuple(generator.random((480, 28, 28), dtype=np.float32) for _ in range(10))
    optical = tuple(generator.random((160, 8, 8), dtype=np.float32) for _ in range(10))
    return Material(mnist, optical, (generator.integers(0, 256, (240, 320, 3), dtype=np.uint8),))


@pytest.mark.unit
@pytest.mark.parametrize("style", STYLES)
def test_a_style_is_a_pure_function_of_its_stream(style):
    material = made_up_material()
    first, again, other = (STYLES[style](3, 5, material, stream(0, style, number)) for number in (1, 1, 2))
    assert (first.shape, first.dtype) == ((SIDE, SIDE, 3), np.uint8)
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.unit
def test_every_font_has_ten_different_digits():
    for font in FONTS:
        glyphs = np.stack([font_glyph(font, digit) for digit in range(10)])
        assert glyphs.max(axis=(1, 2)).min() > 0.9
        assert len(np.unique(glyphs.reshape(10, -1), axis=0)) == 10


@pytest.fixture(scope="module")
def digits() -> Source:
    cache = cache_directory()
    absent = [name for name, member in MEMBERS.items() if not member.path(cache).is_file()]
    if absent:
        pytest.skip(
            f"the raw material of the embedded set is not in the cache ({', '.join(absent)}): run `make assets`"
        )
    return embedded.open_embedded(cache)


@pytest.mark.assets
def test_the_set_has_six_domains_ten_classes_and_equal_cells(digits):
    assert digits.domain_names == ("mnist", "optical", "fonts", "photo", "sketch", "infographic")
    cells = digits.domains * 10 + digits.labels
    assert np.bincount(cells[digits.splits == "train"]).tolist() == [embedded.TRAIN] * 60
    assert np.bincount(cells[digits.splits == "test"]).tolist() == [embedded.TEST] * 60


@pytest.mark.assets
def test_rendering_again_gives_the_same_pixels(digits, monkeypatch):
    monkeypatch.setattr(embedded, "TRAIN", 2)
    monkeypatch.setattr(embedded, "TEST", 0)
    table = pq.read_table(io.BytesIO(embedded.render(cache_directory())))
    again = [decode(value, "rendered") for value in table.column("image").to_pylist()]
    kept = np.flatnonzero((digits.splits == "train") & (digits.ranks < 2))
    for image, index in zip(again, kept, strict=True):
        assert image.tobytes() == digits.image(int(index)).tobytes()


@pytest.mark.assets
def test_the_domain_can_be_told_from_nine_colour_statistics(digits):
    """Means, deviations and contrast of the channels, nearest centre: six domains that looked alike would give 1/6."""
    pixels = np.stack(
        [np.asarray(digits.image(index).resize((16, 16)), dtype=float) for index in range(0, len(digits), 8)]
    )
    edges = abs(np.diff(pixels, axis=1))
    features = np.concatenate([pixels.mean(axis=(1, 2)), pixels.std(axis=(1, 2)), edges.mean(axis=(1, 2))], axis=1)
    domains, half = digits.domains[::8], np.arange(len(pixels)) % 2 == 0
    centres = np.stack([features[half & (domains == domain)].mean(axis=0) for domain in range(6)])
    nearest = ((features[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == domains)[~half].mean() > 0.6


@pytest.mark.assets
def test_the_contact_sheet_shows_every_cell(digits):
    sheet = embedded.contact_sheet(digits, per_cell=2)
    assert sheet.size == (92 + 10 * (2 * SIDE + 4), 20 + 6 * (SIDE + 4))
