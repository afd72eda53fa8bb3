"""Views of images: what is seen in them, and how they are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support import seeded
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.features.augmentation import LONGEST, augmented, draw_views, whole_views
from fedprompt.random_streams import stream

pytestmark = pytest.mark.unit

SIDE = 12
SHARE = st.floats(0.0, 1.0)


def noise_images(count: int = 3) -> Tensor:
    return seeded(1).normal(count, 3, SIDE, SIDE)


def view(left: float = 0.0, top: float = 0.0, width: float = 1.0, height: float = 1.0, mirrored: float = 0.0) -> Tensor:
    return torch.tensor([[left, top, width, height, mirrored]], dtype=torch.float64)


def test_the_view_of_a_whole_image_is_the_image_to_the_bit() -> None:
    images = noise_images()
    assert torch.equal(augmented(images, whole_views(3)), images)


def test_a_mirrored_view_is_the_image_from_right_to_left_and_twice_is_the_image() -> None:
    images, mirrored = noise_images(), view(mirrored=1.0).expand(3, 5)
    assert torch.equal(augmented(images, mirrored), images.flip(-1))
    assert torch.equal(augmented(augmented(images, mirrored), mirrored), images)


@given(left=SHARE, top=SHARE, width=st.floats(0.1, 1.0), height=st.floats(0.1, 1.0), mirrored=st.booleans())
def test_a_crop_of_a_linear_ramp_is_the_ramp_at_the_new_centres(
    left: float, top: float, width: float, height: float, mirrored: bool
) -> None:
    """Row i of a crop lies at top + (i + 1/2) height, in units of the image, but not beyond the outer pixels' centres."""
    left, top = left * (1 - width), top * (1 - height)
    old = torch.arange(SIDE, dtype=torch.float64)
    ramp = (5 + 2 * old[:, None] - 3 * old[None, :]).expand(1, 1, SIDE, SIDE)
    rows = [min(max((top + (i + 0.5) / SIDE * height) * SIDE - 0.5, 0), SIDE - 1) for i in range(SIDE)]
    columns = [min(max((left + (i + 0.5) / SIDE * width) * SIDE - 0.5, 0), SIDE - 1) for i in range(SIDE)]
    columns = columns[::-1] if mirrored else columns
    expected = torch.tensor([[5 + 2 * y - 3 * x for x in columns] for y in rows], dtype=torch.float64)
    found = augmented(ramp, view(left, top, width, height, float(mirrored)))[0, 0]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_a_crop_is_the_bilinear_one_of_pillow() -> None:
    images = noise_images(1)
    box = (1.3, 2.6, 9.1, 11.9)
    scaled = [corner / SIDE for corner in box]
    found = augmented(images, view(scaled[0], scaled[1], scaled[2] - scaled[0], scaled[3] - scaled[1]))
    for channel in range(3):
        image = Image.fromarray(images[0, channel].numpy())
        expected = np.array(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))
        np.testing.assert_allclose(found[0, channel].numpy(), expected, atol=1e-5)


def test_images_of_one_batch_do_not_depend_on_each_other() -> None:
    images, views = noise_images(), draw_views(TrainConfig(random_crop=0.3, random_flip=0.5), 3, seeded())
    together = augmented(images, views)
    for place in range(3):
        torch.testing.assert_close(augmented(images[place : place + 1], views[place : place + 1])[0], together[place])


@given(smallest=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_views_lie_in_the_image_with_the_area_and_the_sides_they_may_have(smallest: float, seed: int) -> None:
    left, top, width, height, mirrored = draw_views(TrainConfig(random_crop=smallest), 50, seeded(seed)).unbind(1)
    assert bool(((left >= 0) & (top >= 0) & (left + width <= 1 + 1e-12) & (top + height <= 1 + 1e-12)).all())
    area, ratio = width * height, torch.maximum(width / height, height / width)
    assert bool(((area >= smallest - 1e-12) & (area <= 1) & (ratio <= LONGEST + 1e-12)).all())
    assert not mirrored.any()


def test_crops_of_the_whole_area_are_whole_images() -> None:
    assert torch.equal(draw_views(TrainConfig(random_crop=1.0), 20, seeded()), whole_views(20))


def test_areas_are_uniform_and_flips_have_their_probability() -> None:
    """Of 20,000 views; five standard errors."""
    count, smallest, probability = 20_000, 0.4, 0.3
    views = draw_views(TrainConfig(random_crop=smallest, random_flip=probability), count, seeded())
    area = views[:, 2] * views[:, 3]
    spread = (1 - smallest) / math.sqrt(12)
    assert float(area.mean()) == pytest.approx((1 + smallest) / 2, abs=5 * spread / math.sqrt(count))
    assert float(area.std()) == pytest.approx(spread, rel=0.02)
    error = math.sqrt(probability * (1 - probability) / count)
    assert float(views[:, 4].mean()) == pytest.approx(probability, abs=5 * error)
    assert float((views[:, 2] > views[:, 3]).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(count))


def test_views_follow_from_the_key_of_their_stream_and_change_from_step_to_step() -> None:
    train = TrainConfig(random_crop=0.5, random_flip=0.5)
    first, again = (stream(0, 1, 2, "augmentation.local") for _ in range(2))
    views = draw_views(train, 4, first)
    assert torch.equal(views, draw_views(train, 4, again))
    assert not torch.equal(views, draw_views(train, 4, first))
    for seed, round, client in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert not torch.equal(views, draw_views(train, 4, stream(seed, round, client, "augmentation.local")))


def test_crops_are_the_same_with_and_without_flips() -> None:
    crops, both = (draw_views(TrainConfig(random_crop=0.5, random_flip=p), 9, seeded()) for p in (None, 1.0))
    assert torch.equal(crops[:, :4], both[:, :4])
    assert both[:, 4].all()
    assert torch.equal(draw_views(TrainConfig(random_flip=1.0), 9, seeded()), view(mirrored=1.0).expand(9, 5))


def test_the_bits_of_a_view_are_golden() -> None:
    """Machines must agree on them: only operations that IEEE 754 rounds in one way are used."""
    views = draw_views(TrainConfig(random_crop=0.5, random_flip=0.5), 2, stream(0, 1, 0, "augmentation.local"))
    assert [[value.hex() for value in row] for row in views.tolist()] == GOLDEN


GOLDEN = [
    ["0x1.67b9f8f6c7795p-4", "0x1.752ac73e68cc1p-5", "0x1.7c17a1c1a6723p-1", "0x1.a9ec40a83b07ep-1", "0x0.0p+0"],
    ["0x1.568f091e44d9bp-6", "0x1.0893d289ed3a2p-4", "0x1.ac31abb7c49a0p-1", "0x1.7e7a8125de891p-1", "0x0.0p+0"],
]
