"""The approximate index by itself: projections keep distances, and a search depends on the points and not on their past."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedprompt.modules.ann_index import DIMENSIONS, Cells, Projection

pytestmark = pytest.mark.unit


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_projections_keep_distances_to_some_per_cent() -> None:
    rows = normal(40, 3000)
    points = torch.from_numpy(Projection(3000).points(rows))
    ratio = torch.pdist(points) / torch.pdist(rows)
    assert points.shape == (40, DIMENSIONS)
    assert float(ratio.min()) > 0.75
    assert float(ratio.max()) < 1.25
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.02)


def test_short_rows_are_their_own_points() -> None:
    rows = normal(5, 30)
    points = Projection(30).points(rows)
    assert np.array_equal(points, rows.numpy())
    rows.zero_()
    assert points.any(), "the points are a copy"


@given(count=st.integers(1, 200), place=st.integers(0, 199))
@settings(max_examples=30)
def test_a_point_is_the_same_bits_in_any_company(count: int, place: int) -> None:
    rows, projection = normal(count, 700), Projection(700)
    place %= count
    assert np.array_equal(projection.points(rows)[place], projection.points(rows[place : place + 1])[0])


def test_points_that_moved_there_and_back_are_found_as_before() -> None:
    points, keys = normal(400, 32).numpy(), 3 * np.arange(400)
    cells = Cells.around(keys, points)
    before = cells.nearest(points[:20], 12)
    cells.put(keys[100:300], 9 + points[100:300])
    away = cells.nearest(points[:20], 12)
    assert away != before
    assert not {key for near in away for key in near} & set(keys[100:300].tolist())
    cells.put(keys[100:300][::-1], points[100:300][::-1])
    assert len(cells) == 400
    assert [set(near) for near in cells.nearest(points[:20], 12)] == [set(near) for near in before]


def test_new_cells_hold_the_same_points() -> None:
    points, keys = normal(300, 16).numpy(), np.arange(300)
    cells = Cells(points[:4].copy())
    cells.put(keys, points)
    again = cells.again(keys)
    assert len(again) == 300
    assert len(again.centres) == 35
    assert all(key in near for key, near in enumerate(again.nearest(points, 5)))
    assert np.array_equal(again.centres, Cells.around(keys, points).centres)


def test_what_is_as_far_as_the_last_one_is_left_out() -> None:
    points = np.zeros((8, 2), np.float32)
    points[:3] = [[0, 0], [1, 0], [0, 2]]
    points[3:] = [[0, 3]] * 5
    cells = Cells(np.zeros((1, 2), np.float32))
    cells.put(np.arange(8), points)
    assert cells.nearest(points[:1], 5) == [[0, 1, 2]], "which two of the five would depend on their order"
    assert cells.nearest(points[:1], 20) == [[0, 1, 2, 3, 4, 5, 6, 7]], "there are no more"
