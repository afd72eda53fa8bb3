"""YAML, JSON, overrides, manifests and model configs that mean harm."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support import peak_of

from fedprompt.backbones.model_folder import folder_shape
from fedprompt.backbones.preprocessing import folder_preprocessing
from fedprompt.config import config_files
from fedprompt.config.strict_yaml import read_yaml
from fedprompt.data.partition.manifest import ClientData, Clients, Manifest
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import BackboneError, ConfigError, DataError, broken
from fedprompt.io.bounded_read import DEPTH, strict_json

pytestmark = pytest.mark.unit

MEGABYTE = 2**20


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
WIDE = f"a: &a [{'x, ' * 1000}]\nb: [{'*a, ' * 1000}]\n"
YAML_BOMBS = {
    "a billion laughs": LAUGHS,
    "a million laughs": WIDE,
    "an alias of nothing": "name: *nothing",
    "a list that holds itself": "name: &name [*name]",
    "deep lists": "name: " + "[" * 50_000,
    "deep sections": "".join(" " * level + "a:\n" for level in range(400)),
    "too many values": "data: [" + "a, " * 20_000 + "]",
    "too many bytes": "name: " + "a" * 2**19,
    "a tag that runs code": "name: !!python/object/apply:os.system ['true']",
    "a date that is none": "name: 2024-13-45",
    "a tag that does not fit": "seed: !!timestamp soon",
    "a number of many digits": "seed: " + "9" * 6000,
    "a hexadecimal number of many digits": "seed: 0x" + "f" * 6000,
    "a key that is a number": "1: 2",
    "a key that is a list": "? [a, b]\n: 1",
    "a key twice": "seed: 1\nseed: 2",
    "a sweep of a trillion runs": "sweep: {"
    + ", ".join(f"train.{key}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for key in "abcdefghijkl")
    + "}",
    "a sweep over a deep name": "sweep: {" + "a." * 2000 + "b: [1]}",
    "bytes that are no text": "name: \x00",
}


@pytest.mark.parametrize("name", YAML_BOMBS)
def test_yaml_bombs_are_config_errors_and_cost_no_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(YAML_BOMBS[name])
    assert peak_of(lambda: config_files.load(path), ConfigError) < 16 * MEGABYTE


def test_a_value_may_be_written_once_and_used_twice() -> None:
    """As `yaml.safe_dump` writes equal lists."""
    half = [0.5, 0.5]
    text = yaml.safe_dump({"mean": half, "std": half})
    assert "*" in text
    assert read_yaml(text) == {"mean": half, "std": half}


def test_a_yaml_file_that_is_no_text_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match="is not YAML"):
        config_files.load(path)


@pytest.mark.parametrize("value", ["[" * 5000, "&a [*a]", "0x" + "f" * 6000, "!!python/name:os.system", "{1: 2}"])
def test_overrides_are_read_with_the_same_limits(value: str) -> None:
    with pytest.raises(ConfigError, match=r"override train\.lr"):
        config_files.apply_overrides({}, [f"train.lr={value}"])


def test_an_override_has_so_many_names() -> None:
    with pytest.raises(ConfigError, match="at most 16 names"):
        config_files.apply_overrides({}, ["a." * 5000 + "b=1"])


@settings(max_examples=200)
@given(st.text(alphabet="ab:-[]{}&*!?|>%@\"'# \n\t0123456789.,~<=", max_size=60))
def test_any_text_is_plain_values_or_a_yaml_error(text: str) -> None:
    with contextlib.suppress(yaml.YAMLError):
        read_yaml(text)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200)
@given(JSON_VALUES)
def test_json_that_is_in_order_is_read_as_it_is(value: Any) -> None:
    assert strict_json(json.dumps(value)) == value


@settings(max_examples=200)
@given(st.text(alphabet='[]{}",:\\ 0123456789eE+-.nulltrfaseNIy', max_size=60))
def test_other_text_is_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        strict_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "every key once, got 'c' twice"),
        ("[NaN]", "finite numbers, got NaN"),
        ("[-Infinity]", "finite numbers, got -Infinity"),
        ("[1e400]", "finite numbers, got 1e400"),
        ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), "levels of brackets"),
        ('{"a":' * 100_000, "levels of brackets"),
        ("9" * 5000, "digits"),
    ],
)
def test_json_that_says_two_things_or_has_no_end_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strict_json(text)


def test_brackets_inside_strings_do_not_count() -> None:
    assert strict_json(json.dumps(["[{" * 100, '"[' * 100, "\\" * 99])) == ["[{" * 100, '"[' * 100, "\\" * 99]


SOURCE = TinySource()


def manifest_values() -> dict[str, Any]:
    held = (ClientData("a", *map(_indices, ([0, 1], [2]))), ClientData("b", *map(_indices, ([3], [4]))))
    clients = Clients.of(held)
    made = Manifest(
        SOURCE.name, SOURCE.fingerprint, SOURCE.class_names, SOURCE.domain_names, clients, {"scheme": "iid"}
    )
    return json.loads(made.to_json())


def _indices(values: list[int]) -> Any:
    import numpy as np

    return np.array(values, dtype=np.int64)


@settings(max_examples=200)
@given(st.data())
def test_a_manifest_with_any_value_replaced_is_read_or_refused(data: st.DataObject) -> None:
    values = manifest_values()
    place: Any = values
    key: Any = data.draw(st.sampled_from(sorted(values)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(JSON_VALUES | st.sampled_from([-1, 2**62, 2**63, 1e18, "0", True, None]))
    try:
        read = Manifest.from_json(json.dumps(values))
        read.check(SOURCE)
    except DataError:
        return
    held = [index for client in read.clients for index in (*client.train, *client.test)]
    assert min(held) >= 0
    assert max(held) < len(SOURCE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "[" * 100_000,
        '{"format": NaN}',
        '{"format": "fedprompt-manifest-1", "format": "fedprompt-manifest-1"}',
        "[" + "1, " * 50_000 + "1]",
    ],
)
def test_what_is_no_manifest_is_told_in_a_short_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        Manifest.load(path)
    assert len(str(caught.value)) < 400


def test_a_manifest_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with path.open("wb") as stream:
        stream.truncate(2**40)  # no bytes on the disk, a terabyte to whoever reads it all
    with pytest.raises(DataError, match="at most 134217728 bytes"):
        Manifest.load(path)


def test_a_long_value_is_shortened_in_a_message() -> None:
    assert len(broken("field", "be short", "x" * 10**6)) < 1100


MODEL = {"model_type": "vit", "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "image_size": 32}


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": -48},
        {"hidden_size": "many"},
        {"hidden_size": 10**15},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"image_size": 10**9},
        {"image_size": []},
        {"layer_norm_eps": "small"},
        {"layer_norm_eps": -1.0},
        {"intermediate_size": None},
        {"model_type": ["vit"]},
        {"model_type": "unheard-of"},
        {"num_channels": 2},
    ],
)
def test_a_model_config_of_impossible_sizes_is_refused_before_anything_is_made(
    change: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "patch_size": 8, **change}))
    with pytest.raises(BackboneError):
        folder_shape(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"model_type": "vit", "model_type": "clip"}', " " * 2**21])
def test_a_model_config_that_is_no_small_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BackboneError, match=r"config\.json"):
        folder_shape(tmp_path)


@pytest.mark.parametrize(
    "text", ["[1]", '{"image_mean": [1, 2], "image_std": 3}', '{"image_mean": NaN}', "[" * 9999, '{"image_mean": "abc"']
)
def test_a_preprocessor_config_that_is_odd_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(BackboneError, match="image_mean"):
        folder_preprocessing(tmp_path)
