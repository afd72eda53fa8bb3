"""What `fedprompt validate` finds without a run."""

from __future__ import annotations

from typing import Any

import pytest

from fedprompt import config as configuration
from fedprompt.errors import BackboneError, ConfigError, DataError, FedpromptError
from fedprompt.experiment.rehearsal import Rehearsal

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"method": {"name": "coop"}}, ConfigError, "backbone.name must be a dual encoder"),
        ({"backbone": {"name": "dinov2-small"}, "method": {"name": "coop"}}, ConfigError, "must be a dual encoder"),
        ({"backbone": {"name": "dinov2-smal"}}, BackboneError, "got 'dinov2-smal'; did you mean 'dinov2-small'?"),
        ({"backbone": {"name": "nowhere.safetensors"}}, BackboneError, "nowhere.safetensors"),
        ({"backbone": {"image_size": 17}}, BackboneError, "backbone.image_size must"),
        ({"method": {"name": "fedvpt_deep", "depth": 99}}, ConfigError, "method.depth must be at most the 3 blocks"),
        ({"method": {"name": "pep_fedpt", "class_blocks": [7]}}, ConfigError, "method.class_blocks must"),
        ({"federation": {"away": {"client_9": [1, 1]}}}, ConfigError, "did you mean 'client_"),
        (
            {"data": {"classes": ["disc"]}, "partition": {"scheme": "classes", "classes_per_client": 2}},
            ConfigError,
            "partition.classes_per_client must be at most the 1 classes of data.classes, got 2",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused_without_the_data(
    settings: Any, changes: dict[str, Any], kind: type[FedpromptError], message: str
) -> None:
    with pytest.raises(kind) as told:
        Rehearsal().check(configuration.parse(settings(**changes)))
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"data": {"source": "nowhere"}}, DataError, "data.source must be"),
        ({"data": {"classes": ["disk", "square"]}}, DataError, "got 'disk'; did you mean 'disc'?"),
        (
            {"partition": {"scheme": "classes", "classes_per_client": 9}},
            ConfigError,
            "partition.classes_per_client must be at most the 5 classes of the data, got 9",
        ),
        ({"partition": {"clients": 1000}}, ConfigError, "must be at most the 80 training images, got 1000"),
    ],
)
def test_what_is_wrong_with_the_data_is_found_only_by_opening_them(
    settings: Any, changes: dict[str, Any], kind: type[FedpromptError], message: str
) -> None:
    config = configuration.parse(settings(**changes))
    assert Rehearsal().check(config).notes == []
    with pytest.raises(kind) as told:
        Rehearsal(deep=True).check(config)
    assert message in str(told.value)


def test_a_backbone_that_is_not_here_is_not_downloaded_but_noted(settings: Any) -> None:
    config = configuration.parse(settings(backbone={"name": "dinov2-small", "image_size": 56}))
    assert Rehearsal(deep=True).check(config).notes == [
        "backbone 'dinov2-small' is not on this machine: method and backbone are not checked"
    ]


def test_classes_in_another_case_are_those_of_the_data(settings: Any) -> None:
    checked = Rehearsal(deep=True).check(configuration.parse(settings(data={"classes": ["Disc", "SQUARE"]})))
    assert checked.notes == []
