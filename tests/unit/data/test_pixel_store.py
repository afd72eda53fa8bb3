"""The store of pixels and the step to tensors."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedprompt.data.cache import row_file
from fedprompt.data.cache.pixel_store import ImageStore, normalise, resized
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import ConfigError, DataError

pytestmark = pytest.mark.unit

SOON = 30  # seconds after which a test gives up


class CountingSource(TinySource):
    """Counts decodings, which is what the store is there to save."""

    def __init__(self) -> None:
        super().__init__()
        self.decoded: list[int] = []

    def image(self, index: int) -> Image.Image:
        self.decoded.append(index)
        return super().image(index)


def expected(indices: list[int], size: int) -> np.ndarray:
    source = TinySource()
    return np.stack([resized(source.image(index), size, "squash") for index in indices])


def test_pixels_come_in_the_order_asked_with_repeats(cache):
    store = ImageStore(TinySource(), 8, "squash", cache)
    assert (store.pixels(np.array([9, 3, 9])) == expected([9, 3, 9], 8)).all()
    assert store.pixels(np.array([], dtype=np.int64)).shape == (0, 8, 8, 3)


def test_an_image_is_decoded_once_and_never_again_by_a_later_store(cache):
    source = CountingSource()
    store = ImageStore(source, 8, "squash", cache)
    store.pixels(np.array([5, 1]))
    store.pixels(np.array([1, 5, 2]))
    assert source.decoded == [1, 5, 2]
    again = ImageStore(source, 8, "squash", cache)
    assert (again.pixels(np.array([5, 2])) == expected([5, 2], 8)).all()
    assert source.decoded == [1, 5, 2]


@pytest.mark.parametrize("change", ["size", "resize", "fingerprint"])
def test_other_settings_or_images_never_share_a_file(cache, change):
    first = ImageStore(TinySource(), 8, "squash", cache)
    other = TinySource()
    if change == "fingerprint":
        other.fingerprint = "0" * 64
    store = ImageStore(other, 9 if change == "size" else 8, "crop" if change == "resize" else "squash", cache)
    assert store.path != first.path


def test_a_torn_write_is_decoded_again(cache):
    store = ImageStore(TinySource(), 8, "squash", cache)
    store.pixels(np.arange(4))
    with store.path.open(
        "r+b"
    ) as file:  # as after a power cut: the checksum reached the disk, half of the pixels did not
        file.seek(2 * 8 * 8 * 3 + 96)
        file.write(b"\0" * 96)
    source = CountingSource()
    assert (ImageStore(source, 8, "squash", cache).pixels(np.arange(4)) == expected([0, 1, 2, 3], 8)).all()
    assert source.decoded == [2]


def test_pixels_without_a_checksum_are_not_believed(cache):
    store = ImageStore(TinySource(), 8, "squash", cache)
    with store.path.open("r+b") as file:  # as after a kill between the two writes
        file.write(b"\7" * 192)
    assert (store.pixels(np.array([0])) == expected([0], 8)).all()


def test_a_shortened_file_is_filled_again(cache):
    first = ImageStore(TinySource(), 8, "squash", cache)
    first.pixels(np.arange(6))
    os.truncate(first.path, 192 * 3)
    assert (ImageStore(TinySource(), 8, "squash", cache).pixels(np.arange(6)) == expected(list(range(6)), 8)).all()


def fill(cache: Path, seed: int) -> None:
    indices = np.random.default_rng(seed).permutation(360)
    store = ImageStore(TinySource(), 8, "squash", cache)
    for start in range(0, 360, 30):
        found = store.pixels(indices[start : start + 30])
        assert (found == expected(indices[start : start + 30].tolist(), 8)).all()


def test_two_processes_fill_one_store_at_once(cache):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fill, args=(cache, seed)) for seed in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    source = CountingSource()
    store = ImageStore(source, 8, "squash", cache)
    assert (store.pixels(np.arange(360)) == expected(list(range(360)), 8)).all()
    assert source.decoded == []


def test_pixels_stay_in_memory_when_the_cache_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    source = CountingSource()
    with pytest.warns(UserWarning, match="decoded images stay in memory"):
        store = ImageStore(source, 8, "squash", tmp_path / "file")
    for _ in range(2):
        assert (store.pixels(np.array([3, 1])) == expected([3, 1], 8)).all()
    assert source.decoded == [1, 3]


def test_a_disk_that_fills_up_half_way_loses_nothing(cache, monkeypatch):
    store = ImageStore(TinySource(), 8, "squash", cache)
    store.pixels(np.array([0, 1]))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_file, "write_at", full)
    with pytest.warns(UserWarning, match="No space left"):
        found = store.pixels(np.array([2, 0, 3]))
    assert (found == expected([2, 0, 3], 8)).all()
    assert (store.pixels(np.array([1, 3])) == expected([1, 3], 8)).all()


class SlowSource(CountingSource):
    """Stops while it decodes one image, until it is told to go on."""

    def __init__(self, slow: int) -> None:
        super().__init__()
        self._slow, self.begun, self.go = slow, threading.Event(), threading.Event()
        self.readers = 0

    def image(self, index: int) -> Image.Image:
        self.readers += 1
        assert self.readers == 1, "one image at a time is read"
        if index == self._slow:
            self.begun.set()
            assert self.go.wait(SOON)
        image = super().image(index)
        self.readers -= 1
        return image


def in_background(store: ImageStore, indices: list[int]) -> threading.Thread:
    thread = threading.Thread(target=store.decode_ahead, args=(np.array(indices),), daemon=True)
    thread.start()
    return thread


def test_what_was_decoded_ahead_is_not_decoded_again(cache):
    source = CountingSource()
    store = ImageStore(source, 8, "squash", cache)
    store.decode_ahead(np.arange(40)[::-1])
    assert sorted(source.decoded) == list(range(40))
    assert store.known(np.arange(41)).tolist() == [True] * 40 + [False]
    assert (store.pixels(np.array([39, 0])) == expected([39, 0], 8)).all()
    assert len(source.decoded) == 40


def test_who_needs_an_image_that_is_under_way_waits_for_it(cache):
    source = SlowSource(3)
    store = ImageStore(source, 8, "squash", cache)
    thread = in_background(store, [3, *range(20, 100)])
    assert source.begun.wait(SOON)
    threading.Timer(0.2, source.go.set).start()
    found = store.pixels(np.array([3, 5, 99]))
    thread.join(SOON)
    assert (found == expected([3, 5, 99], 8)).all()
    assert sorted(source.decoded) == [3, 5, *range(20, 100)], "each once"


INTERRUPTED = """
import signal, sys, threading, time
from pathlib import Path
import numpy as np
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.data.cache.pixel_store import ImageStore

class Stuck(TinySource):
    def image(self, index):
        begun.set()
        time.sleep(600)

begun = threading.Event()
store = ImageStore(Stuck(), 8, "squash", Path(sys.argv[1]))
threading.Thread(target=store.decode_ahead, args=(np.array([3]),), daemon=True).start()
begun.wait()
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.alarm(1)
store.pixels(np.array([3]))
"""


def test_who_waits_for_an_image_can_be_interrupted(cache):
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, cache], timeout=60, capture_output=True, check=False)
    assert b"KeyboardInterrupt" in ended.stderr


def test_an_image_that_cannot_be_decoded_ahead_is_told_to_whoever_asks_for_it(cache):
    source = CountingSource()

    def broken(index: int) -> Image.Image:
        if index == 7:
            raise DataError("image must be readable: 7")
        return TinySource.image(source, index)

    source.image = broken
    store = ImageStore(source, 8, "squash", cache)
    store.decode_ahead(np.arange(10))
    assert (store.pixels(np.array([6, 8])) == expected([6, 8], 8)).all()
    with pytest.raises(DataError, match="readable: 7"):
        store.pixels(np.array([6, 7]))


def test_images_are_decoded_ahead_into_memory_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    source = CountingSource()
    with pytest.warns(UserWarning, match="decoded images stay in memory"):
        store = ImageStore(source, 8, "squash", tmp_path / "file")
    store.decode_ahead(np.array([3, 1]))
    assert store.known(np.array([1, 2, 3])).tolist() == [True, False, True]
    assert (store.pixels(np.array([3, 1])) == expected([3, 1], 8)).all()
    assert source.decoded == [1, 3]


def test_an_index_out_of_range_is_refused(cache):
    with pytest.raises(IndexError, match=r"indices must be in 0\.\.359, got \[-1, 2\]"):
        ImageStore(TinySource(), 8, "squash", cache).pixels(np.array([2, -1]))


def test_an_unknown_resize_is_refused(cache):
    with pytest.raises(ConfigError, match=r"data\.resize must be 'squash' or 'crop', got 'pad'"):
        ImageStore(TinySource(), 8, "pad", cache)


def test_crop_takes_the_centre_and_squash_takes_all():
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 200  # the middle square
    image = Image.fromarray(pixels)
    assert resized(image, 10, "crop").tolist() == np.full((10, 10, 3), 200).tolist()
    assert resized(image, 10, "squash")[5, 0].tolist() == [0, 0, 0]


def test_normalise_subtracts_the_mean_and_divides_by_the_deviation():
    torch = pytest.importorskip("torch")
    pixels = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    pixels[1, 2, 3] = [255, 51, 0]
    result = normalise(pixels, (0.5, 0.2, 0.1), (0.5, 0.4, 0.2), torch.float64, "cpu")
    assert tuple(result.shape) == (2, 3, 4, 4)
    assert result[1, :, 2, 3].tolist() == pytest.approx([1.0, 0.0, -0.5])
    assert result[0, :, 0, 0].tolist() == pytest.approx([-1.0, -0.5, -0.5])
    assert normalise(pixels, (0.5,) * 3, (0.5,) * 3, torch.bfloat16, "cpu").dtype == torch.bfloat16
