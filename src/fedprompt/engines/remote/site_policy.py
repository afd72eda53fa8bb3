"""What a site allows: `policy.yaml` next to its key, written by the site's own people. The server never sees it.

The server proposes runs. The policy decides in which of them this site takes part, which figures of its test images it releases,
and its privacy budget over all runs. Each broken rule is reported in one sentence, before any image is read. Free of torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from fedprompt.config import Config, Section, complaints
from fedprompt.config.setting_types import MOST_EPOCHS, MOST_ROUNDS
from fedprompt.config.strict_yaml import MOST_BYTES, read_yaml
from fedprompt.core.registry import METHODS
from fedprompt.errors import ConfigError, broken
from fedprompt.io.bounded_read import read_text

if TYPE_CHECKING:
    from fedprompt.core.method import Method, Stage, World

FILE = "policy.yaml"
MOST_OF_METHOD = 4096  # any whole number among the settings of a method: tokens, experts, widths, epochs, steps


class SitePolicy(Section):
    """What a site allows. Every setting may be left out."""

    methods: list[str] | None = None
    """Methods that may be run here, by name; any when absent."""
    variants: list[str] | None = None
    """Variants that may be run here; any when absent, none with []."""
    least_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Take part only in runs with privacy.noise_at: client and at least this noise multiplier; `--least-noise` may require more."""
    least_count: Annotated[int, Field(ge=1)] = 5
    """Sums over images of a class leave only if the run withholds sums of fewer images. A sum of one image is its feature."""
    most_rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 10_000
    """Rounds of one run."""
    most_epochs: Annotated[int, Field(ge=1, le=MOST_EPOCHS)] = 100
    """Epochs of one participation, or of fitting before one evaluation."""
    most_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """This machine's total time for one run; no limit when absent."""
    total_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Epsilon of all runs together, counted in state/privacy_ledger.json; no limit when absent."""
    total_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """The same for delta, if total_epsilon is given."""
    run_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """The delta for the epsilon of each run at this site, independent of the server's delta."""
    evaluate: Literal["none", "counts", "noised", "all"] = "counts"
    """Figures of test images that are sent: none; the numbers of images and of correct ones; the same with noise; or all."""
    evaluation_epsilon: Annotated[float, Field(ge=0.001, le=10)] = 0.1
    """Epsilon of one noised evaluation."""
    least_test_images: Annotated[int, Field(ge=1)] = 5
    """With fewer test images, in total or in a domain, no figures of them are sent."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of test images, if the images come without a split. It is drawn once, for all runs."""
    test_per_cell: Annotated[int, Field(ge=1)] | None = None
    """Most test images per (domain, class); all when absent."""
    train_per_cell: Annotated[int, Field(ge=1)] | None = None
    """Most training images per (domain, class); all when absent. Runs cannot choose another number."""
    approve: bool = False
    """A person must approve every run: `fedprompt node approve FOLDER RUN`."""

    @model_validator(mode="after")
    def _consistent(self) -> SitePolicy:
        if self.total_epsilon is not None and self.evaluate in ("counts", "all"):
            raise ValueError("have evaluate: none or noised if total_epsilon is given: no epsilon covers exact figures")
        return self


@dataclass(frozen=True)
class Refused:
    """A reason to refuse a run: the name of the rule, and a sentence without private details."""

    rule: str
    text: str


def load_policy(folder: Path) -> SitePolicy | None:
    """The policy in a folder; None if there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        values = read_yaml(read_text(path, MOST_BYTES))
        return SitePolicy.model_validate({} if values is None else values)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in complaints(error, "").splitlines())) from error
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"{path} must be readable YAML: {error}") from error


def default_text() -> str:
    """The default policy as a file that explains itself."""
    lines = [
        "# What this site allows. Only this site reads this file: the server never sees it and cannot change it.",
        "# Every line shows a default; remove the '#' before a setting to change it, then restart the node.",
        "# Try it before a run: fedprompt node --site FOLDER --data IMAGES --check --config CONFIG. More: docs/deploy.md.",
    ]
    for name, field in SitePolicy.model_fields.items():
        value = yaml.safe_dump(field.default, default_flow_style=True).splitlines()[0]
        lines += ["", *textwrap.wrap(field.description or "", 116, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"# {name}: {value}")
    return "\n".join([*lines, ""])


def refused_settings(policy: SitePolicy, config: Config) -> Iterator[Refused]:
    """Rules broken by the settings alone; checked before anything is built. A noise that is not computed yet is skipped."""
    for section, values in (("method", config.method), ("variant", config.variant or {})):
        for name, value in _whole_numbers(values):
            if abs(value) > MOST_OF_METHOD:
                yield Refused("policy", broken(f"{section}.{name}", f"be at most {MOST_OF_METHOD} here", value))
    known = policy.methods
    if known is not None and config.method["name"] not in {*known, *map(METHODS.current, known)}:
        yield Refused(
            "policy", broken("method.name", f"be one of {', '.join(known) or '(none)'} here", config.method["name"])
        )
    known = policy.variants
    if known is not None and config.variant is not None and config.variant["name"] not in known:
        yield Refused(
            "policy", broken("variant.name", f"be one of {', '.join(known) or '(none)'} here", config.variant["name"])
        )
    if config.federation.rounds > policy.most_rounds:
        rule = f"be at most {policy.most_rounds} here"
        yield Refused("policy", broken("federation.rounds", rule, config.federation.rounds))
    if config.train.epochs > policy.most_epochs:
        yield Refused("policy", broken("train.epochs", f"be at most {policy.most_epochs} here", config.train.epochs))
    if config.federation.evaluate_on != "test":
        rule = "be test where clients are sites: which images are used is a site's choice"
        yield Refused("policy", broken("federation.evaluate_on", rule, config.federation.evaluate_on))
    yield from _refused_privacy(policy, config)


def _refused_privacy(policy: SitePolicy, config: Config) -> Iterator[Refused]:
    settings = config.privacy
    if settings is not None and settings.noise_at == "step":
        yield Refused("privacy", broken("privacy.noise_at", "be client or server where clients are sites", "step"))
    if (policy.least_noise or policy.evaluate == "noised") and config.federation.evaluate_at == "after_local":
        yield Refused("privacy", "federation.evaluate_at must not be after_local here: its figures are not noised")
    if (policy.least_noise or policy.evaluate == "noised") and config.federation.never_picked == "fit":
        text = "federation.never_picked must be apart here: figures after fitting to training images would reveal them"
        yield Refused("privacy", text)
    if (policy.least_noise or policy.evaluate == "noised") and config.federation.test_classes == "own":
        text = "federation.test_classes must be all here: figures among the classes of training images would tell which there are"
        yield Refused("privacy", text)
    at_client = settings is not None and settings.noise_at == "client"
    noise = settings.noise if settings is not None and at_client else 0.0
    if noise is not None and noise < policy.least_noise:
        text = f"privacy must have noise_at: client and noise of at least {policy.least_noise:g} here, got {noise:g}"
        yield Refused("privacy", text)
    if policy.total_epsilon is not None and noise is not None and not noise:
        text = "privacy must have noise_at: client and noise above 0 here: this site has a privacy budget"
        yield Refused("budget", text)


def refused_method(policy: SitePolicy, config: Config, method: Method, world: World, client: int) -> Iterator[Refused]:
    """Rules broken by what the method sends and trains; checked before an image is read."""
    for name, statistic in sorted(world.roles.stat.items()):
        if statistic.count is not None and statistic.minimum < policy.least_count:
            rule = f"be withheld by the method if it covers fewer than {policy.least_count} images (minimum_count)"
            yield Refused("policy", broken(f"statistic {name!r}", rule, statistic.minimum))
    held_out = client in world.newcomers
    training = () if held_out else method.stages(world, config.train)
    fitting = (
        method.newcomer(world, config.train, config.federation.newcomer_epochs)
        if held_out
        else method.adaptation(world, config.train)
    )
    for what, stages in (("training", training), ("fitting before an evaluation", fitting)):
        epochs = sum(stage.epochs for stage in stages)
        if epochs > policy.most_epochs:
            yield Refused("policy", broken(f"epochs of {what}", f"be at most {policy.most_epochs} here", epochs))
    if policy.evaluate == "none":
        return
    noised = policy.least_noise or policy.evaluate == "noised"
    if noised and any(map(_trains, fitting)):
        why = "federation.held_out" if held_out else f"method {config.label!r}"
        text = (
            f"{why} must not fit anything to training images before an evaluation here: its figures would reveal them"
        )
        yield Refused("privacy", text)
    if noised and world.roles.local and config.federation.evaluate_at != "global":
        text = (
            f"federation.evaluate_at must be global here for method {config.label!r}, or this site must send no figures "
            "(evaluate: none): what the client keeps was fitted to training images, and no noise hides them in figures"
        )
        yield Refused("privacy", text)


def _trains(stage: Stage) -> bool:
    return bool(stage.trainable) and stage.epochs > 0 and stage.steps != 0


def _whole_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every whole number in some settings, with the name of the setting."""
    for name, value in values.items():
        waiting: list[Any] = [value]
        while waiting:
            each = waiting.pop()
            if isinstance(each, Mapping):
                waiting += each.values()
            elif isinstance(each, list | tuple):
                waiting += each
            elif isinstance(each, int):
                yield name, each
