"""Names that others add to: tables, entry points, plugin files, and settings of what was added."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from pydantic import Field
from support import run

from fedprompt import config, extensions
from fedprompt.backbones.load import load_backbone
from fedprompt.config import AggregationConfig, BackboneConfig, DataConfig, PartitionConfig, registries
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.sources.open import kinds as formats
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import BackboneError, ConfigError, ContractError
from fedprompt.experiment.experiment import Experiment
from fedprompt.extensions import Registry
from fedprompt.federation.aggregate import rule

pytestmark = pytest.mark.unit

TABLES = {
    "aggregation": registries.AGGREGATORS,
    "data": registries.SOURCES,
    "partition": registries.PARTITIONS,
    "backbone": registries.BACKBONES,
    "engine": registries.ENGINES,
}
FIELDS = {"aggregation": "rule", "data": "format", "partition": "scheme", "engine": "kind"}


@contextmanager
def added(table: Registry[Any], name: str, thing: Any) -> Iterator[None]:
    """A thing that is registered for as long as a test wants it."""
    table.add(name, thing)
    try:
        yield
    finally:
        del table._table[name]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_names_that_configs_are_checked_by_are_those_that_are_registered(table: Registry[Any]) -> None:
    assert set(table.fixed) == set(table.table()) | table.words
    assert table.others() == {}


@pytest.mark.parametrize("section", FIELDS)
def test_an_unknown_name_is_told_by_field_rule_and_value(section: str) -> None:
    field = f"{section}.{FIELDS[section]}"
    with pytest.raises(ConfigError) as caught:
        config.parse({section: {FIELDS[section]: "nonsense"}})
    known = ", ".join(TABLES[section].fixed)
    assert str(caught.value) == f"{field} must be one of {known}, got 'nonsense'"


def test_a_name_that_is_no_text_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^aggregation\.rule must be a valid string, got 3$"):
        config.parse({"aggregation": {"rule": 3}})


@pytest.mark.parametrize("section", FIELDS)
def test_a_registered_name_is_a_value_of_its_setting(section: str) -> None:
    with added(TABLES[section], "mine", lambda: None):
        made = config.parse({section: {FIELDS[section]: "mine"}})
    assert getattr(getattr(made, section), FIELDS[section]) == "mine"


def test_a_stored_config_may_name_what_is_not_here() -> None:
    stored = config.parse({"aggregation": {"rule": "theirs", "options": {"x": 1}}}, check_names=False)
    assert stored.aggregation.rule == "theirs"
    with pytest.raises(ConfigError, match=r"aggregation\.rule must be one of mean, .*, got 'theirs'"):
        rule(stored.aggregation)


OLD_DEFAULTS: dict[str, Any] = {
    "train": {"lr": 0.01, "momentum": 0.9, "schedule": "constant", "clip_norm": None},
    "federation": {"evaluate_last": 10},
}


@pytest.mark.parametrize(
    ("values", "digest", "family"),
    [
        ({**OLD_DEFAULTS}, "88a99d00ec03ac33", "19fe4d3f4a4408b6"),
        (
            {
                **OLD_DEFAULTS,
                "name": "tiny",
                "seed": 3,
                "data": {"source": "tiny", "format": "tiny", "train_per_cell": 4},
                "partition": {"scheme": "dirichlet", "clients": 4, "alpha": 0.5},
                "backbone": {"name": "tiny"},
                "method": {"name": "fedvpt", "prompt_tokens": 2},
                "aggregation": {"rule": "trimmed_mean", "malicious": 0.1},
                "engine": {"workers": 2},
            },
            "f5aca918f4cb8f4b",
            "dbefe275b7f514d5",
        ),
    ],
)
def test_configs_of_old_have_the_hashes_they_had(values: dict[str, Any], digest: str, family: str) -> None:
    made = config.parse(values)
    assert (made.digest(), made.family()) == (digest, family)
    assert "options" not in str(made.model_dump())
    assert config.parse(made.model_dump(mode="json")) == made


def test_options_are_part_of_the_hash_where_there_are_any() -> None:
    plain, given = config.parse({}), config.parse({"aggregation": {"options": {"step": 0.5}}})
    assert given.model_dump()["aggregation"]["options"] == {"step": 0.5}
    assert plain.digest() != given.digest()
    assert config.parse({"aggregation": {"options": {}}}).digest() == plain.digest()


def test_editors_are_offered_our_names_and_allow_others() -> None:
    schema = config.Config.model_json_schema()["$defs"]["AggregationConfig"]["properties"]["rule"]
    assert schema["anyOf"] == [{"enum": list(registries.AGGREGATORS.fixed)}, {"type": "string"}]


def test_a_name_is_registered_once() -> None:
    def impostor() -> None: ...

    registries.AGGREGATORS.table()
    with pytest.raises(ConfigError, match=r"aggregation\.rule must be registered once, got 'mean' from fedprompt\.fed"):
        registries.AGGREGATORS.add("mean", impostor)


@pytest.mark.parametrize(
    ("name", "thing", "message"),
    [
        ("auto", lambda: None, r"data\.format must not be one of auto, which have a meaning, got 'auto'"),
        ("a b", lambda: None, r"data\.format must be registered as letters, .*, got 'a b'"),
        ("mine", 3, r"data\.format 'mine' must be a function or a class, got 3"),
    ],
)
def test_what_cannot_be_registered_is_told(name: str, thing: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registries.SOURCES.add(name, thing)
    assert "mine" not in registries.SOURCES


def damped(
    tensors: Any,
    weights: Any,
    around: Any = None,
    *,
    malicious: float,
    step: Annotated[float, Field(gt=0)] = 1.0,
    power: int,
) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([malicious, step, float(power)])}


def combined(**settings: Any) -> list[float]:
    given = [{"x": torch.zeros(3)}]
    return rule(AggregationConfig(rule="damped", **settings))(given, [1.0])["x"].tolist()


def test_settings_come_from_the_section_by_name_and_all_others_from_its_options() -> None:
    with added(registries.AGGREGATORS, "damped", damped):
        assert combined(malicious=0.25, options={"power": 2, "step": 3}) == [0.25, 3.0, 2.0]
        assert combined(options={"power": 2}) == pytest.approx([0.2, 1.0, 2.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "aggregation.options.power must be given"),
        ({"power": "2"}, "aggregation.options.power must be a valid integer, got '2'"),
        ({"power": 2, "step": 0}, "aggregation.options.step must be greater than 0, got 0"),
        (
            {"malicious": 0.1},
            "aggregation.options.malicious is not a setting of damped; it has power, step",
        ),
    ],
)
def test_a_bad_option_is_told_by_field_rule_and_value(options: dict[str, Any], message: str) -> None:
    with added(registries.AGGREGATORS, "damped", damped), pytest.raises(ConfigError) as caught:
        combined(options=options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": {"options": {"x": 1}}}, "aggregation.options.x is not a setting of mean; it has none"),
        ({"partition": {"options": {"x": 1}}}, "partition.options.x is not a setting of domains; it has none"),
        ({"engine": {"options": {"x": 1}}}, "engine.options.x is not a setting of in-process; it has none"),
        ({"backbone": {"options": {"x": 1}}}, "backbone.options.x is not a setting of tiny; it has none"),
        (
            {"backbone": {"name": "some/where", "options": {"x": 1}}},
            "backbone.options must be given with a backbone.name they belong to, got {'x': 1}",
        ),
        (
            {"data": {"options": {"x": 1}}},
            "data.options must be given with the data.format they belong to, got {'x': 1}",
        ),
        (
            {"data": {"format": "tiny", "options": {"x": 1}}},
            "data.options.x is not a setting of tiny; it has none",
        ),
    ],
)
def test_options_that_are_nobodys_are_refused_before_anything_is_opened(
    settings: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(settings(**changes))
    assert str(caught.value) == message


@pytest.mark.parametrize("result", [None, {}, {"x": torch.zeros(4)}, {"x": torch.zeros(3, dtype=torch.float64)}])
def test_a_rule_must_give_tensors_like_those_it_was_given(result: Any) -> None:
    with (
        added(registries.AGGREGATORS, "damped", lambda tensors, weights, around: result),
        pytest.raises(ContractError, match=r"^aggregation\.rule 'damped' must give tensors like those of a client"),
    ):
        combined()


def test_a_rule_of_others_is_what_a_run_aggregates_with(settings: Any) -> None:
    calls: list[int] = []

    def first(tensors: Any, weights: Any, around: Any = None, *, which: int = 0) -> Any:
        calls.append(len(tensors))
        return tensors[which]

    with added(registries.AGGREGATORS, "first", first):
        changes = {"method": {"name": "fedvpt", "head": "shared"}, "aggregation": {"rule": "first"}}
        run(settings(**changes, federation={"rounds": 1}))
    assert calls == [4]


def test_a_source_must_be_one(tmp_path: Path) -> None:
    with added(registries.SOURCES, "odd", lambda source, cache: [source]):
        assert formats()[-1]["format"] == "odd"
        with pytest.raises(ContractError, match=r"^data\.format 'odd' must give a fedprompt\.Source, got \['here'\]$"):
            open_source(DataConfig(source="here", format="odd"), tmp_path)


def test_a_backbone_must_be_one(tmp_path: Path) -> None:
    rule = r"^backbone\.name 'odd:x' must give a .*ViT, got 'odd:x'$"
    with (
        added(registries.BACKBONES, "odd", lambda config, cache: config.name),
        pytest.raises(ContractError, match=rule),
    ):
        load_backbone(BackboneConfig(name="odd:x"), tmp_path)


def test_our_own_backbones_are_no_families(tmp_path: Path) -> None:
    with pytest.raises(
        BackboneError, match=r"^backbone\.name must be one of dinov2-small, .*, got 'tiny:x'; did you mean 'tiny'\?$"
    ):
        load_backbone(BackboneConfig(name="tiny:x"), tmp_path)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda train, test: [(train, test)], "give images to 2 clients, got 1"),
        (lambda train, test: [(train, test), (train[:1], test[:0])], "give every training image to one client, got"),
        (lambda train, test: [(train, test), (train[:0], test[:1])], "give every test image to one client, got"),
        (lambda train, test: [(train, test), (test[:1], test[:0])], "give out training images that there are, got"),
        (lambda train, test: [(train, test), (train[:0], np.array([10**9]))], "give out test images that there are"),
    ],
)
def test_a_partition_gives_every_image_to_one_client_at_most(give: Any, message: str) -> None:
    odd = added(registries.PARTITIONS, "odd", lambda supply, clients, seed: give(supply.train, supply.test))
    with odd, pytest.raises(ContractError) as caught:
        make_manifest(TinySource(), DataConfig(source="tiny"), PartitionConfig(scheme="odd", clients=2), seed=0)
    assert str(caught.value).startswith(f"partition.scheme 'odd' must {message}")


PLUGIN = """
from fedprompt import register_partition

@register_partition("halves")
def halves(supply, clients, seed):
    "Two clients."
    return [(supply.train[k::clients], supply.test[k::clients]) for k in range(clients)]
"""


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
    )


def test_the_environment_names_plugins(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(PLUGIN)
    code = "from fedprompt.config import parse; print(parse({'partition': {'scheme': 'halves'}}).partition.scheme)"
    assert python(code, tmp_path, FEDPROMPT_PLUGINS="one.py").stdout.strip() == "halves"
    refused = python(code, tmp_path)
    assert "partition.scheme must be one of manifest, domains" in refused.stderr


def test_names_of_ours_need_no_plugin_and_no_torch(tmp_path: Path) -> None:
    """A plugin that cannot be imported is only in the way of those who need it."""
    (tmp_path / "bad.py").write_text("1 / 0\n")
    code = (
        "import sys; from fedprompt.config import parse\n"
        "parse({'partition': {'scheme': 'iid'}, 'aggregation': {'rule': 'krum'}, 'data': {'format': 'hub'}})\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = python(code, tmp_path, FEDPROMPT_PLUGINS="bad.py")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers, loads and names in the environment is gone afterwards."""
    for table in TABLES.values():
        monkeypatch.setattr(table, "_table", dict(table._table))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setenv(extensions.PLUGINS, "")


@pytest.mark.usefixtures("registrations")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.py", None, "--plugin must be a Python file (.py) that exists, got '{path}'"),
        ("plugin.txt", PLUGIN, "--plugin must be a Python file (.py) that exists, got '{path}'"),
        ("empty.py", "x = 1\n", "--plugin must register something, see docs/extending.md, got '{path}'"),
        (
            "broken.py",
            "import no_such_module\n",
            "--plugin must be a file that can be imported, got '{path}': ModuleNotFoundError: No module named "
            "'no_such_module'",
        ),
        (
            "ends.py",
            "raise SystemExit(0)\n",
            "--plugin must be a file that can be imported, got '{path}': SystemExit: 0",
        ),
        (
            "impostor.py",
            PLUGIN.replace("halves", "iid"),
            "partition.scheme must be registered once, got 'iid' from fedprompt.data.partition.schemes and {path}",
        ),
    ],
)
def test_a_plugin_that_is_none_is_told(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    for _ in range(2):  # it is not taken for loaded the second time
        with pytest.raises(ConfigError) as caught:
            extensions.add_plugins([path])
        assert str(caught.value) == message.format(path=path)
    assert os.environ[extensions.PLUGINS] == ""


@pytest.mark.usefixtures("registrations")
def test_plugins_are_loaded_once_and_named_to_other_processes(tmp_path: Path) -> None:
    """Files of one name in different folders are different plugins."""
    first, second = tmp_path / "a" / "plugin.py", tmp_path / "b" / "plugin.py"
    for path, name in ((first, "halves"), (second, "wholes")):
        path.parent.mkdir()
        path.write_text(PLUGIN.replace("halves", name) + f"open({str(path.parent / 'runs')!r}, 'a').write('x')\n")
    extensions.add_plugins([first, second, first])
    extensions.add_plugins([second])
    assert (first.parent / "runs").read_text() == (second.parent / "runs").read_text() == "x"
    assert os.environ[extensions.PLUGINS] == os.pathsep.join([str(first), str(second)])
    assert list(registries.PARTITIONS.others()) == ["halves", "wholes"]


@pytest.mark.usefixtures("registrations")
def test_a_path_that_the_environment_could_not_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"a{os.pathsep}b.py"
    path.write_text(PLUGIN)
    with pytest.raises(ConfigError, match=r"^--plugin must have no .* in its path"):
        extensions.add_plugins([path])


@pytest.mark.usefixtures("registrations")
def test_an_error_of_ours_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from fedprompt.errors import DataError\nraise DataError('no images')\n")
    with pytest.raises(Exception, match=r"^no images$"):
        extensions.add_plugins([path])


GROUPS = {
    "aggregators": "from fedprompt import register_aggregator as door",
    "sources": "from fedprompt import register_source as door",
    "partitions": "from fedprompt import register_partition as door",
    "backbones": "from fedprompt import register_backbone as door",
    "engines": "from fedprompt import register_engine as door",
}


@pytest.mark.parametrize("group", GROUPS)
def test_every_table_has_an_entry_point_group(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real metadata, as an installer would write it."""
    (table,) = [each for each in TABLES.values() if each.group == f"fedprompt.{group}"]
    metadata = tmp_path / "their_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[fedprompt.{group}]\ntheirs = their_{group}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(table, "_table", dict(table._table))
    monkeypatch.setattr(extensions, "_loaded_groups", set())
    with pytest.raises(
        ConfigError, match=f"entry point 'theirs' of group 'fedprompt.{group}' cannot be loaded: No mod"
    ):
        table.names()
    (tmp_path / f"their_{group}.py").write_text(f"{GROUPS[group]}\n\n@door('theirs')\ndef theirs():\n    'Theirs.'\n")
    importlib.invalidate_caches()
    assert "theirs" in table
    assert table.get("theirs").__doc__ == "Theirs."
