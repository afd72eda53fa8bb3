"""Stages that train on a share of the images or stop after some steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import experiment, local_tensors, run, worst_difference

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Progress, Seen, Stage, World
from fedprompt.core.roles import Roles
from fedprompt.features.image_bank import Images
from fedprompt.methods.head_tune import HeadTune
from fedprompt.modules.heads import NAMES
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

NUMBERS = itertools.count()


@dataclass(frozen=True)
class Staged(HeadTune):
    """A local head that is trained in the given stages; the run is watched through its losses and its progress."""

    parts: tuple[tuple[tuple[float, float], int | None], ...] = (((0.0, 1.0), None),)  # share and steps of each stage
    epochs: int = 1
    same_name: bool = True
    batches: tuple[list[Any], ...] = ()
    ends: tuple[list[Progress], ...] = ()

    def init(self, world: World, generator: Stream) -> Roles:
        head = self.with_head(world, Roles())
        return Roles(local=head.shared)

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return tuple(
            Stage(self, NAMES, self.epochs, "local" if self.same_name else f"stage{number}", steps=steps, share=share)
            for number, (share, steps) in enumerate(self.parts)
        )

    def loss(self, world: World, params: Tensors, logits: Any, seen: Seen, batch: Batch, noise: Tensors) -> Any:
        for found in self.batches:
            found.append(seen.cls.detach())
        return super().loss(world, params, logits, seen, batch, noise)

    def finish(self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress) -> Any:
        for found in self.ends:
            found.append(progress)
        return super().finish(world, client, received, params, progress)


def watched(settings: Any, **changes: Any) -> tuple[Any, list[Any], Progress]:
    """A run of one client and one round: the run, the features of each batch in turn, and the progress."""
    batches: list[Any] = []
    ends: list[Progress] = []
    method = Staged(batches=(batches,), ends=(ends,), **changes)
    values = settings(
        name=f"run{next(NUMBERS)}",
        partition={"scheme": "iid", "clients": 1},
        federation={"rounds": 1},
        data={"train_per_cell": 2},
    )
    done = run(values, method)
    return done, batches, ends[0]


def features(settings: Any) -> torch.Tensor:
    """All training features of the one client, in its own order."""
    from fedprompt.data.cache.pixel_store import ImageStore
    from fedprompt.features.image_bank import ImageBank

    made = experiment(settings(partition={"scheme": "iid", "clients": 1}, data={"train_per_cell": 2}))
    source, manifest, backbone, _ = made.factory.prepare()
    images: Images = ImageBank(source, manifest, ImageStore(source, 16, "squash", made.factory.cache), backbone).images(
        0, "train"
    )
    return images.features("cls", torch.arange(len(images)))


def places(batches: list[torch.Tensor], everything: torch.Tensor) -> list[int]:
    """Which images were trained on, recognised by their features."""
    rows = torch.cat(batches)
    distances = torch.cdist(rows.double(), everything.double())
    assert distances.min(1).values.max() < 1e-4
    return distances.argmin(1).tolist()


def test_a_stage_sees_only_its_share_every_epoch(settings: Any) -> None:
    everything = features(settings)
    assert len(everything) % 2 == 0
    _, batches, progress = watched(settings, parts=(((0.0, 0.5), None),), epochs=3)
    half = len(everything) // 2
    seen = places(batches, everything)
    assert len(seen) == 3 * half
    assert len(set(seen)) == half
    assert set(seen) != set(range(half)), "the images of a share are not the first ones"
    assert progress.steps == 3 * -(-half // 8)


def test_two_shares_part_the_images_whatever_the_stage_is_called(settings: Any) -> None:
    everything = features(settings)
    for same_name in (True, False):
        _, batches, _ = watched(settings, parts=(((0.0, 0.5), None), ((0.5, 1.0), None)), same_name=same_name)
        seen = places(batches, everything)
        assert sorted(seen) == list(range(len(everything)))


def test_a_share_holds_the_same_images_in_every_round(settings: Any) -> None:
    everything = features(settings)
    batches: list[Any] = []
    values = settings(
        partition={"scheme": "iid", "clients": 1}, federation={"rounds": 3}, data={"train_per_cell": 2}, name="rounds"
    )
    run(values, Staged(batches=(batches,), parts=(((0.0, 0.5), None),)))
    rounds = [batches[start : start + len(batches) // 3] for start in range(0, len(batches), len(batches) // 3)]
    first, *others = (set(places(each, everything)) for each in rounds)
    assert len(rounds) == 3
    assert len(first) == len(everything) // 2
    assert all(other == first for other in others)


def test_the_whole_share_is_no_share_at_all(settings: Any) -> None:
    """Training on everything uses the client's own order, so that batches are those of a stage that says nothing."""
    plain, batches, _ = watched(settings)
    said, others, _ = watched(settings, parts=(((0.0, 1.0), None),))
    assert all(torch.equal(one, other) for one, other in zip(batches, others, strict=True))
    assert worst_difference(local_tensors(plain, 0), local_tensors(said, 0)) == 0.0


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_a_stage_stops_after_its_steps_and_has_trained_on_the_first_batches(settings: Any, steps: int) -> None:
    per_epoch = -(-len(features(settings)) // 8)
    assert per_epoch < 7, "the longest case must reach into the second epoch"
    _, all_batches, _ = watched(settings, epochs=2)
    _, batches, progress = watched(settings, parts=(((0.0, 1.0), steps),), epochs=2)
    assert progress.steps == len(batches) == steps
    assert all(torch.equal(one, other) for one, other in zip(batches, all_batches, strict=False))
    assert progress.step_sizes == pytest.approx(dict.fromkeys(NAMES, steps * 0.05))


def test_more_steps_than_there_are_change_nothing(settings: Any) -> None:
    plain, _, _ = watched(settings)
    capped, _, progress = watched(settings, parts=(((0.0, 1.0), 1000),))
    assert progress.steps == -(-len(features(settings)) // 8)
    assert worst_difference(local_tensors(plain, 0), local_tensors(capped, 0)) == 0.0


def test_each_stage_counts_its_own_steps(settings: Any) -> None:
    _, batches, progress = watched(settings, parts=(((0.0, 1.0), 2), ((0.0, 1.0), 3)))
    assert progress.steps == len(batches) == 5
    assert torch.equal(batches[0], batches[2]), "stages of the same name see the same batches"


def test_no_steps_train_nothing(settings: Any) -> None:
    done, batches, progress = watched(settings, parts=(((0.0, 1.0), 0),))
    assert batches == []
    assert progress.steps == 0
    assert not local_tensors(done, 0)["head.weight"].any()
    assert done.rounds()[1].loss is None
