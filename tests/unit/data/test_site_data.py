"""A site's own images: opened on its own terms, with class names that were agreed on, as one client among others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from fedprompt.config import DataConfig, parse
from fedprompt.core import registry
from fedprompt.data import site_data
from fedprompt.data.partition.manifest import Manifest
from fedprompt.data.partition.split import train_and_test
from fedprompt.data.site_data import Agreed, Agreement, agree, open_site, site_manifest, sites_manifest
from fedprompt.data.sources.base import MOST_NAMES, Source
from fedprompt.data.sources.subset import of_classes
from fedprompt.data.sources.synthetic import CLASSES, TinySource
from fedprompt.errors import ConfigError, DataError
from fedprompt.runs.families import settings_of
from fedprompt.runs.run import Run
from fedprompt.runs.store import RunStore

pytestmark = pytest.mark.unit
DATA = DataConfig(source="tiny")
SITES = ("north", "south", "west")
NAMES = st.sampled_from(["cat", "Cat", " cat", "dog", "sea-lion", "sea_lion", "sea lion", "gnu"])
LISTS = st.lists(NAMES, min_size=2, max_size=5, unique=True)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def write_image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (len(path.name), 7, 9)).save(path)


def folder(root: Path, **sizes: int) -> str:
    for label, count in sizes.items():
        for number in range(count):
            write_image(root / label / f"{number}.png")
    return str(root)


# what a site opens


def test_a_site_opens_its_own_folder_and_not_the_federations_source(tmp_path: Path, cache: Path):
    federation = DataConfig(source="nowhere.parquet", format="parquet", classes=["somewhere", "else"], novel=0.5)
    source = open_site(folder(tmp_path / "own", cat=3, dog=2), "auto", federation, cache)
    assert source.class_names == ("cat", "dog")
    assert np.bincount(source.labels).tolist() == [3, 2]


def test_a_site_keeps_as_many_images_of_a_domain_as_the_federation_says(cache: Path):
    source = open_site("tiny", "auto", DataConfig(source="embedded", per_domain=10), cache)
    assert np.bincount(source.domains).tolist() == [10] * 4
    assert source.class_names == CLASSES


def test_a_missing_source_is_told_by_the_option_it_came_from(cache: Path):
    with pytest.raises(DataError, match=r"^--data must be .*, got '/no/such/place'$"):
        open_site("/no/such/place", "auto", DATA, cache)


def test_an_unknown_format_is_refused_before_anything_is_opened(cache: Path):
    with pytest.raises(ConfigError, match=r"^data\.format must be .*, got 'zip'$"):
        open_site("tiny", "zip", DATA, cache)


# which class names count


def test_equal_sets_of_names_agree_in_sorted_order():
    assert agree({"a": ["dog", "cat"], "b": ["cat", "dog"]}, None) == Agreement(("cat", "dog"), {})


def test_sites_with_different_names_agree_on_nothing_and_each_is_told_why():
    found = agree({"a": ["cat", "dog"], "b": ["cat", "dog", "gnu"], "c": ["dog", "cat"]}, None)
    beginning = "class names must be the same at all sites, unless data.classes lists them: "
    assert found.class_names is None
    assert found.refused == {
        "a": beginning + "this site lacks 'gnu'",
        "b": beginning + "only this site has 'gnu'",
        "c": beginning + "this site lacks 'gnu'",
    }


def test_a_name_that_several_but_not_all_have_is_told_apart_from_one_a_site_has_alone():
    found = agree({"a": ["cat", "dog", "gnu"], "b": ["cat", "dog"], "c": ["cat", "owl"]}, None)
    assert found.refused["a"].endswith(
        "only this site has 'gnu'; not every other site has 'dog'; this site lacks 'owl'"
    )


@pytest.mark.parametrize("meant", ["Sea lion", " sea lion ", "sea_lion", "sea-lion", "SEA-LION\u00a0"])
def test_a_name_spelt_otherwise_is_another_name_but_the_sentence_says_what_may_be_meant(meant: str):
    found = agree({"a": ["cat", "sea lion"], "b": ["cat", meant]}, None)
    assert found.class_names is None
    assert f"only this site has {meant!r} (did you mean 'sea lion'?); this site lacks 'sea lion'" in found.refused["b"]
    listed = agree({"b": ["cat", meant]}, ["cat", "sea lion"])
    assert listed.refused == {
        "b": f"class names must be among those of the federation, got {meant!r} (did you mean 'sea lion'?)"
    }


def test_listed_classes_keep_their_order_and_a_site_may_lack_some_of_them():
    found = agree({"a": ["cat"], "b": ["dog", "gnu"], "c": ["gnu", "owl"]}, ["gnu", "dog", "cat"])
    assert found.class_names == ("gnu", "dog", "cat")
    assert found.refused == {"c": "class names must be among those of the federation, got 'owl'"}


def test_a_long_list_of_differences_is_cut_with_likely_misspellings_first():
    names = [f"class {number:02d}" for number in range(20)]
    found = agree({"a": ["cat", "dog", *names, "Gnu"]}, ["cat", "dog", "gnu"])
    assert "got 'Gnu' (did you mean 'gnu'?), 'class 00', 'class 01'" in found.refused["a"]
    assert found.refused["a"].endswith("'class 08' and 11 more")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("cat", "class names must be a list, got 'str'"),
        (None, "class names must be a list, got 'NoneType'"),
        ({"cat": 1, "dog": 2}, "class names must be a list, got 'dict'"),
        (["cat"], "class names must be 2 to 100000, got 1"),
        ([str(number) for number in range(MOST_NAMES + 1)], "class names must be 2 to 100000, got 100001"),
        (["cat", 3], "class names must be text, got 'int'"),
        (["cat", ["dog"]], "class names must be text, got 'list'"),
        (["cat", "cat", "dog"], "class names must hold every class once, got 'cat'"),
        (["cat", ""], "class names must have 1 to 200 letters, not all blank, and no control characters, got ''"),
        (["cat", " \t"], "no control characters, got ' \\t'"),
        (["cat", "x" * 201], f"no control characters, got '{'x' * 201}'"),
        (["cat", "dog\nINFO all is well"], "no control characters, got 'dog\\nINFO all is well'"),
        (["cat", "\ud800"], "no control characters, got '\\ud800'"),
    ],
)
def test_a_proposal_that_is_no_list_of_names_is_refused_and_the_others_agree(names: object, told: str):
    found = agree({"a": ["dog", "cat"], "bad": names, "c": ["cat", "dog"]}, None)  # type: ignore[dict-item]
    assert found.class_names == ("cat", "dog")
    assert found.refused.keys() == {"bad"}
    assert told in found.refused["bad"]


@pytest.mark.parametrize(("wanted", "value"), [(["cat"], "1"), (["cat", "cat"], "'cat'"), (["cat", ""], "''")])
def test_a_list_of_classes_that_cannot_be_met_is_an_error_of_the_config(wanted: list[str], value: str):
    with pytest.raises(ConfigError, match=rf"^data\.classes must .*, got {value}$"):
        agree({"a": ["cat", "dog"]}, wanted)


def test_nobody_agrees_on_nothing():
    assert agree({}, None) == Agreement(None, {})
    assert agree({}, ["cat", "dog"]) == Agreement(("cat", "dog"), {})


@given(st.dictionaries(st.text(), JUNK, max_size=4), st.none() | LISTS)
@example({"a": ["\ud800", "b"], "b": ["x", "y"]}, None)
def test_whatever_arrives_is_accepted_or_refused_and_never_an_error(proposals, wanted):
    found = agree(proposals, wanted)
    assert found.refused.keys() <= proposals.keys()
    assert all(isinstance(told, str) and told.isprintable() for told in found.refused.values())
    for place, names in proposals.items():
        if place not in found.refused:
            assert found.class_names is not None
            assert set(names) <= set(found.class_names)
    if wanted is None and found.class_names is not None:
        assert list(found.class_names) == sorted(set(found.class_names))


@given(st.dictionaries(st.sampled_from("abcd"), LISTS, min_size=1), st.none() | LISTS, st.randoms())
def test_neither_the_order_of_sites_nor_that_of_names_matters(proposals, wanted, random):
    mixed = {place: random.sample(proposals[place], len(proposals[place])) for place in sorted(proposals, reverse=True)}
    assert agree(proposals, wanted) == agree(mixed, wanted)


# labels of the agreed classes


def test_labels_count_the_agreed_classes_and_a_site_may_lack_some():
    own = of_classes(TinySource(), ("cross", "disc"))
    source = Agreed(own, ["bars", "cross", "disc", "moon"])
    assert source.class_names == ("bars", "cross", "disc", "moon")
    assert [source.class_names[label] for label in source.labels] == [own.class_names[label] for label in own.labels]
    assert np.bincount(source.labels, minlength=4).tolist() == [0, 72, 72, 0]
    assert np.array_equal(np.asarray(source.image(5)), np.asarray(own.image(5)))


def test_images_have_one_identity_whatever_their_classes_are_numbered():
    assert Agreed(TinySource(), CLASSES[::-1]).fingerprint == TinySource().fingerprint


def test_a_class_that_the_federation_does_not_have_is_refused():
    with pytest.raises(DataError, match=r"^--data must hold only classes of the federation, got .'disc' in 'tiny'.$"):
        Agreed(TinySource(), [name for name in CLASSES if name != "disc"])


# the site as a client


def test_a_site_is_one_client_among_others_who_hold_nothing_here():
    source = TinySource()
    manifest = site_manifest(source, DATA, SITES, 1)
    train, test = train_and_test(source, DATA)
    assert list(manifest.clients.names) == list(SITES)
    assert manifest.clients[1].train.tolist() == train.tolist()
    assert manifest.clients[1].test.tolist() == test.tolist()
    assert manifest.clients.train.sizes.tolist() == [0, 240, 0]
    assert manifest.clients.test.sizes.tolist() == [0, 120, 0]
    assert manifest.class_matrix(source.labels).tolist() == [[0] * 5, [48] * 5, [0] * 5]
    assert Manifest.from_facts(manifest.to_facts().get).checksum == manifest.checksum


def test_a_site_without_images_of_a_class_is_divided_as_ever():
    source = Agreed(of_classes(TinySource(), ("cross", "disc")), CLASSES)
    data = DataConfig(source="tiny", train_per_cell=3, test_per_cell=2)
    with pytest.raises(DataError, match="have training images of every class"):
        train_and_test(source, data)
    manifest = site_manifest(source, data, SITES, 0)
    assert manifest.class_matrix(source.labels)[0].tolist() == [12, 0, 0, 12, 0]
    assert manifest.clients.test.sizes.tolist() == [16, 0, 0]


def test_a_folder_without_split_is_divided_by_the_federations_fraction_and_seed(tmp_path: Path, cache: Path):
    own = folder(tmp_path / "own", cat=10, dog=20)
    data = [DataConfig(source="tiny", test_fraction=0.3, split_seed=seed) for seed in (0, 0, 1)]
    first, again, other = (site_manifest(open_site(own, "auto", each, cache), each, SITES, 2) for each in data)
    assert (first.clients.train.sizes[2], first.clients.test.sizes[2]) == (21, 9)
    assert first.checksum == again.checksum
    assert first.checksum != other.checksum


class OneEach(Source):
    """One image of every class, so that none can be set aside for testing."""

    def __init__(self, split: str | None) -> None:
        self.name, self.fingerprint, self.class_names, self.domain_names = "one-each", "0" * 64, CLASSES, ("all",)
        self.labels, self.domains = np.arange(len(CLASSES)), np.zeros(len(CLASSES), dtype=np.int64)
        self.splits = None if split is None else np.full(len(CLASSES), split)

    def image(self, index: int) -> Image.Image:
        raise NotImplementedError


@pytest.mark.parametrize(("split", "lacking"), [(None, "test"), ("train", "test"), ("test", "train")])
def test_a_site_without_training_or_test_images_is_told_to_look_at_its_data(split: str | None, lacking: str):
    with pytest.raises(DataError, match=f"^--data must have {lacking} images, got \"none in 'one-each'\"$"):
        site_manifest(OneEach(split), DATA, SITES, 0)


# what the server writes down


def test_the_manifest_of_a_server_names_sites_and_classes_and_no_image():
    manifest = sites_manifest(SITES, ("dog", "cat"))
    assert (manifest.source_name, manifest.class_names) == (site_data.SITES, ("dog", "cat"))
    assert [(len(client.train), len(client.test)) for client in manifest.clients] == [(0, 0)] * 3
    assert manifest.class_matrix(np.array([], dtype=np.int64)).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("names", [SITES, ("client_0", "client_1")])
def test_a_manifest_without_images_survives_facts_and_json(names: tuple[str, ...]):
    manifest = sites_manifest(names, ("dog", "cat"))
    for again in (Manifest.from_facts(manifest.to_facts().get), Manifest.from_json(manifest.to_json())):
        assert again.checksum == manifest.checksum
        assert list(again.clients.names) == list(names)


def test_the_identity_of_sites_follows_their_names_and_classes():
    found = {
        sites_manifest(names, classes).source_fingerprint
        for names in (SITES, SITES[::-1], SITES[:2])
        for classes in (("dog", "cat"), ("cat", "dog"))
    }
    assert len(found) == 6


def test_a_run_of_sites_can_be_read(tmp_path: Path, settings):
    config, manifest = registry.completed(parse(settings())), sites_manifest(SITES, ("dog", "cat"))
    facts = {"config": config.model_dump(mode="json"), "backbone": "0" * 64, **manifest.to_facts()}
    RunStore.create(tmp_path / "run", {**facts, "classes": ["dog", "cat"], "domains": ["all"]}).close()
    run = Run(tmp_path / "run")
    try:
        assert run.manifest().checksum == manifest.checksum
        assert list(run.clients) == list(SITES)
        assert run.summary()["rounds"] == 0
        assert settings_of(run)["data.fingerprint"] == manifest.source_fingerprint
        manifest.picture(np.array([], dtype=np.int64), tmp_path / "matrix.png")
    finally:
        run.close()
