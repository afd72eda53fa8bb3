"""Classes that are kept from the federation, and how its clients are tested on them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from support import StopAfter, Stopped, content, experiment, run, shared_tensors
from torch import Tensor

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.config import DataConfig, TrainConfig
from fedprompt.core.method import Method, Stage, World
from fedprompt.core.registry import variants
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.data.partition.manifest import Clients
from fedprompt.data.partition.split import train_and_test
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.open import open_both
from fedprompt.data.sources.subset import base_and_novel, of_classes
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import ConfigError
from fedprompt.evaluation.base_to_novel import BaseToNovel
from fedprompt.methods.coop import CoOp
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.zero_shot import ZeroShot
from fedprompt.report import comparison_table, table_formats
from fedprompt.report.html_report import render
from fedprompt.report.tasks import by_task
from fedprompt.runs.novel_figures import harmonic_mean, stored_figures

pytestmark = pytest.mark.unit

SHARE = 0.4  # of five classes: two are novel
TINY = TinySource()


@pytest.fixture
def novel(settings: Any) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        data = {"novel": SHARE, **changes.pop("data", {})}
        method = {"name": "promptfl", "context_tokens": 2}
        return settings(**{"backbone": {"name": "tiny-clip"}, "method": method, "data": data, **changes})

    return make


@hypothesis.settings(max_examples=15)
@given(some.integers(2, 5), some.floats(0.01, 0.99))
def test_the_last_share_of_the_classes_is_novel_and_both_parts_number_their_own(classes: int, share: float) -> None:
    whole = of_classes(TINY, TINY.class_names[:classes])
    if share * classes < 1:
        with pytest.raises(ConfigError, match=r"data\.novel must be at least one of the"):
            base_and_novel(whole, share)
        return
    base, kept = base_and_novel(whole, share)
    assert base.class_names + kept.class_names == whole.class_names
    assert len(kept.class_names) == int(share * classes + 1e-9)
    assert len(base) + len(kept) == len(whole)
    for part in (base, kept):
        assert set(part.labels) == set(range(len(part.class_names)))
    assert base.fingerprint != kept.fingerprint != whole.fingerprint


def test_half_of_an_odd_number_leaves_the_larger_half_to_the_base() -> None:
    base, kept = base_and_novel(TinySource(), 0.5)
    assert (len(base.class_names), len(kept.class_names)) == (3, 2)


def test_a_share_that_is_a_whole_number_of_classes_is_that_number() -> None:
    many = TinySource()
    many.class_names = tuple(f"c{number}" for number in range(100))
    assert len(base_and_novel(many, 0.29)[1].class_names) == 29  # 0.29 * 100 is a little less in floating point


def test_an_image_of_a_novel_class_is_the_one_of_the_whole_source() -> None:
    whole = TinySource()
    _, kept = base_and_novel(whole, SHARE)
    place = int(np.flatnonzero(whole.labels == 3)[5])
    index = int(np.flatnonzero(np.flatnonzero(whole.labels >= 3) == place)[0])
    assert np.array_equal(np.asarray(kept.image(index)), np.asarray(whole.image(place)))
    assert kept.labels[index] == 0


def test_the_federation_sees_base_classes_only(novel: Any) -> None:
    source, manifest, _, world = experiment(novel()).factory.prepare()
    assert world.class_names == source.class_names == TinySource().class_names[:3]
    assert manifest.class_names == world.class_names
    assert source.labels.max() == 2


def naive_accuracy(backbone: DualEncoder, source: Source, indices: np.ndarray, context: Tensor, cache: Path) -> float:
    """Embed, encode, compare: with none of the machinery of a run."""
    pixels = ImageStore(source, backbone.shape.image_size, "squash", cache).pixels(indices)
    with torch.no_grad():
        tokens = backbone.embed(normalise(pixels, backbone.mean, backbone.std, backbone.dtype, backbone.device))
        images = backbone.run(tokens, reads=("image",))["image"]
        text = backbone.language(source.class_names).encode(context.unsqueeze(0), "end")[0]
    return float(((images @ text.T).argmax(-1).numpy() == source.labels[indices]).mean())


def test_base_and_novel_are_those_of_a_naive_computation(novel: Any) -> None:
    done = run(novel())
    found = stored_figures(done.reader)
    assert found is not None
    made = experiment(novel())
    base, kept = open_both(made.config.data, made.factory.cache)
    assert kept is not None
    _, _, backbone, _ = made.factory.prepare()
    assert isinstance(backbone, DualEncoder)
    context = shared_tensors(done)["context"]
    for name, source in (("base", base), ("novel", kept)):
        indices = train_and_test(source, made.config.data)[1]
        assert found["images"][name] == len(indices) == {"base": 24, "novel": 16}[name]
        expected = naive_accuracy(backbone, source, indices, context, made.factory.cache)
        assert found[name] == pytest.approx(expected)  # all clients of PromptFL predict with the same context
    assert found["local"] == pytest.approx(statistics.fmean(done.client_accuracies().values()))
    assert found["classes"] == {"base": 3, "novel": 2}
    assert list(found["clients"]) == done.clients
    assert found["hm"] == pytest.approx(statistics.harmonic_mean([found["base"], found["novel"]]))
    assert found["hm3"] == pytest.approx(statistics.harmonic_mean([found[k] for k in ("local", "base", "novel")]))


def test_another_set_is_classified_by_its_own_names(settings: Any) -> None:
    """Two of its classes under other names: the figures are those of a computation with these names."""
    data = {"other_set": "tiny", "classes": ["disc", "square", "cross"]}
    done = run(settings(backbone={"name": "tiny-clip"}, data=data), ZeroShot())
    found = stored_figures(done.reader)
    assert found is not None
    made = experiment(settings(backbone={"name": "tiny-clip"}, data=data), ZeroShot())
    source, _, backbone, world = made.factory.prepare()
    assert isinstance(backbone, DualEncoder)
    whole = TinySource()
    limited = DataConfig(source="tiny", train_per_cell=4, test_per_cell=2)
    words = world.text.words("a photo of a")
    for name, images in (("base", source), ("novel", whole)):
        indices = train_and_test(images, limited)[1]
        assert found[name] == pytest.approx(naive_accuracy(backbone, images, indices, words, made.factory.cache))
    assert found["classes"] == {"base": 3, "novel": 5}


def test_a_method_that_knows_only_its_own_classes_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.other_set must be absent for fedvpt"):
        run(settings(data={"other_set": "tiny"}))


def test_clients_with_parameters_of_their_own_differ_and_are_averaged(novel: Any) -> None:
    rough = {"lr": 2.0, "epochs": 3}
    found = stored_figures(run(novel(train=rough), CoOp(context_tokens=2)).reader)
    assert found is not None
    for name in ("base", "novel"):
        values = [figures[name] for figures in found["clients"].values()]
        assert len(set(values)) > 1
        assert found[name] == pytest.approx(statistics.fmean(values))


def test_what_a_method_derives_from_class_names_is_derived_from_the_novel_ones(novel: Any) -> None:
    done = run(novel(), ZeroShot())
    found = stored_figures(done.reader)
    made = experiment(novel())
    _, kept = open_both(made.config.data, made.factory.cache)
    _, _, backbone, _ = made.factory.prepare()
    assert found is not None
    assert kept is not None
    assert isinstance(backbone, DualEncoder)
    indices = train_and_test(kept, made.config.data)[1]
    words = backbone.text.words("a photo of a")
    assert found["novel"] == pytest.approx(naive_accuracy(backbone, kept, indices, words, made.factory.cache))


@dataclass(frozen=True)
class Tuned(PromptFL):
    """Each client tunes a copy of the context before an evaluation."""

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, ("context",), 3, "tune"),)


def test_a_copy_is_tuned_on_base_classes_and_then_asked_about_novel_ones(novel: Any) -> None:
    values = novel(seed=1, train={"lr": 2.0})
    found = stored_figures(run(values, Tuned(context_tokens=2)).reader)
    assert found is not None
    assert len({figures["novel"] for figures in found["clients"].values()}) > 1
    shared = stored_figures(run({**values, "name": "untuned"}, PromptFL(context_tokens=2)).reader)
    assert shared is not None
    assert len({figures["novel"] for figures in shared["clients"].values()}) == 1


@pytest.mark.parametrize("variant", ["fedprox", "ditto", "scaffold"])
def test_variants_are_tested_like_the_method_inside_them(variant: str, novel: Any) -> None:
    wrapped = variants()[variant](inner=PromptFL(context_tokens=2))  # type: ignore[call-arg]
    found = stored_figures(run(novel(train={"momentum": 0.0}), wrapped).reader)
    assert found is not None
    assert 0 <= found["novel"] <= 1


@pytest.mark.parametrize("at", ["global", "after_local"])
def test_the_point_of_evaluation_is_the_configured_one(at: str, novel: Any) -> None:
    found = stored_figures(run(novel(federation={"evaluate_at": at}, train={"lr": 1.0}), CoOp(context_tokens=2)).reader)
    assert found is not None
    distinct = {figures["base"] for figures in found["clients"].values()}
    assert len(distinct) == 1 if at == "global" else len(distinct) > 1


def test_held_out_clients_are_the_ones_that_are_tested(novel: Any) -> None:
    done = run(novel(federation={"held_out": 0.5}))
    found = stored_figures(done.reader)
    assert found is not None
    assert set(found["clients"]) == set(done.client_accuracies())
    assert len(found["clients"]) == 2


def test_a_run_that_was_stopped_is_tested_when_it_ends_and_only_once(
    novel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, round in (("early", 1), ("late", 2)):  # late: after the last round, before the test
        with pytest.raises(Stopped):
            run(novel(name=name), observer=StopAfter(round))
    whole = run(novel(name="whole"))
    for name in ("early", "late"):
        assert content(run(novel(name=name), resume=True)) == content(whole)

    def never(*_: object) -> None:
        raise AssertionError("tested again")

    monkeypatch.setattr(BaseToNovel, "measure", never)
    assert content(run(novel(name="whole"), resume=True)) == content(whole)


def test_the_split_of_a_manifest_decides_on_the_base_test_images(novel: Any, tmp_path: Path) -> None:
    manifest = experiment(novel()).factory.prepare()[1]
    fewer = replace(manifest, clients=Clients.of(replace(client, test=client.test[:3]) for client in manifest.clients))
    fewer.save(tmp_path / "mine.json")
    partition = {"scheme": "manifest", "manifest": str(tmp_path / "mine.json")}
    found = stored_figures(run(novel(partition=partition)).reader)
    assert found is not None
    assert found["images"] == {"base": 12, "novel": 16}


@dataclass(frozen=True)
class Forgetful(PromptFL):
    """Keeps something by label, and says so."""

    @property
    def names_any_class(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (PromptFL(class_specific=True), r"the size of context follows the number of classes, got 0\.4"),
        (Forgetful(), r"data\.novel must be 0 for promptfl, which knows only the classes it was trained on, got 0\.4"),
        (variants()["fedprox"](inner=Forgetful()), "which knows only the classes"),  # type: ignore[call-arg]
        (variants()["ditto"](inner=PromptFL(class_specific=True)), "follows the number of classes"),  # type: ignore[call-arg]
    ],
)
def test_methods_that_cannot_name_new_classes_are_refused_before_training(
    method: Method, message: str, novel: Any
) -> None:
    values = novel()
    with pytest.raises(ConfigError, match=message):
        run(values, method)
    assert not Path(values["output"]["directory"]).exists()


def test_a_method_with_a_head_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.novel must be 0 for fedvpt, which knows only the classes"):
        run(settings(data={"novel": 0.5}))


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share: float, novel: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.novel must"):
        experiment(novel(data={"novel": share}))


def test_a_share_of_less_than_a_class_is_refused(novel: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.novel must be at least one of the 5 classes of 'tiny', got 0\.1"):
        run(novel(data={"novel": 0.1}))


def test_the_harmonic_mean_is_nought_as_soon_as_one_value_is() -> None:
    assert harmonic_mean(0.5, 0.0) == 0
    assert harmonic_mean(0.5, 0.25) == pytest.approx(1 / 3)


def test_tables_have_more_columns_only_where_there_are_figures_for_them(novel: Any, settings: Any) -> None:
    done, plain = run(novel()), run(settings())
    found = stored_figures(done.reader)
    assert found is not None
    rows = comparison_table.comparison([done, plain])
    assert rows[0].values["novel"] == comparison_table.Spread(found["novel"], None)
    assert rows[1].values["novel"] is None
    header = comparison_table.header(comparison_table.columns(rows))
    assert [title for title in header if title in ("Local", "Base", "Novel", "HM", "HM3")] == [
        "Local",
        "Base",
        "Novel",
        "HM",
        "HM3",
    ]
    assert "Not comparable, these settings differ" in comparison_table.notes(rows)[0]
    tasks = by_task([done, plain])
    assert [task.title for task in tasks] == ["tiny-clip", "tiny"]
    assert comparison_table.NOVEL_EXPLANATION in table_formats.markdown(tasks)
    assert table_formats.json_rows(tasks)[0]["hm"] == {"mean": found["hm"], "std": None}
    assert ",hm3,hm3_std" in table_formats.csv(tasks).splitlines()[0]
    assert table_formats.csv(tasks).splitlines()[1].endswith(f"{found['hm3']},")
    assert ">Novel<" in render([done, plain])

    only_plain = comparison_table.comparison([plain])
    assert comparison_table.all_columns(only_plain) == comparison_table.COLUMNS
    assert "hm" not in table_formats.json_rows(by_task([plain]))[0]
    assert comparison_table.NOVEL_EXPLANATION not in table_formats.markdown(by_task([plain]))
