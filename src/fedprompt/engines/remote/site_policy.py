"""What a site allows: `policy.yaml` beside its key, written by the site's own people and read by no one else.

The server proposes runs; the policy decides which of them this site takes part in, what it tells of its test images, and how much
it gives away over all runs together. Each rule that a run breaks is told in one sentence, before any image is looked at. Free of torch.
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
from fedprompt.config.settings import MOST_EPOCHS, MOST_ROUNDS
from fedprompt.config.strict_yaml import MOST_BYTES, read_yaml
from fedprompt.errors import ConfigError, broken
from fedprompt.io.bounded_read import read_text

if TYPE_CHECKING:
    from fedprompt.core.method import Method, Stage, World

FILE = "policy.yaml"
MOST_OF_METHOD = 100_000  # any whole number among the settings of a method: tokens, experts, widths, epochs, steps


class SitePolicy(Section):
    """What a site allows. Every setting may be left out."""

    methods: list[str] | None = None
    """Methods that may be run here, by name; any when absent."""
    variants: list[str] | None = None
    """Variants that may be run here; any when absent, none with []."""
    least_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Take part only in runs with privacy.noise_at: client and a noise multiplier of at least this; `--least-noise` may ask for more."""
    least_count: Annotated[int, Field(ge=1)] = 5
    """Sums over images of a class leave only if the run withholds those of fewer images than this. The sum of one image is its feature."""
    most_rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 10_000
    """Of one run."""
    most_epochs: Annotated[int, Field(ge=1, le=MOST_EPOCHS)] = 100
    """Of one participation, or of what is fitted for one evaluation."""
    most_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Of this machine's time for one run in all; no limit when absent."""
    total_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What all runs together may spend, counted in state/privacy_ledger.json; no limit when absent."""
    total_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """The same of delta, where there is a limit of epsilon."""
    run_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """The delta at which the epsilon of each run is reckoned here, whatever the server reckons with."""
    evaluate: Literal["none", "counts", "noised", "all"] = "counts"
    """What is told of test images: nothing; how many there are and how many were right; the same with noise; or all figures."""
    evaluation_epsilon: Annotated[float, Field(ge=0.001, le=10)] = 0.1
    """Of one evaluation that is noised."""
    least_test_images: Annotated[int, Field(ge=1)] = 5
    """With fewer, of all or of a domain, nothing is told of them."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the images that test, where the images have no split of their own. It is drawn once, for all runs."""
    test_per_cell: Annotated[int, Field(ge=1)] | None = None
    """At most so many test images of every (domain, class); all when absent."""
    approve: bool = False
    """A person must say yes to every run: `fedprompt node approve FOLDER RUN`."""

    @model_validator(mode="after")
    def _consistent(self) -> SitePolicy:
        if self.total_epsilon is not None and self.evaluate in ("counts", "all"):
            raise ValueError(
                "have evaluate: none or noised where total_epsilon is given: no epsilon covers exact figures"
            )
        return self


@dataclass(frozen=True)
class Refused:
    """What a run would be refused for: the rule in a word, and a sentence that anybody may read."""

    rule: str
    text: str


def load_policy(folder: Path) -> SitePolicy | None:
    """The policy in a folder; None where there is none."""
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
        "# What this site allows. This file is the site's own: the server never sees it and cannot change it.",
        "# Every line shows a default; take away the '#' before a setting to change it, then restart the node.",
        "# Try it before a run: fedprompt node --site FOLDER --data IMAGES --check --config CONFIG. More: docs/deploy.md.",
    ]
    for name, field in SitePolicy.model_fields.items():
        value = yaml.safe_dump(field.default, default_flow_style=True).splitlines()[0]
        lines += ["", *textwrap.wrap(field.description or "", 116, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"# {name}: {value}")
    return "\n".join([*lines, ""])


def refused_settings(policy: SitePolicy, config: Config) -> Iterator[Refused]:
    """What settings alone break; asked before anything is made of them. Noise that is still to be found is not judged."""
    for section, values in (("method", config.method), ("variant", config.variant or {})):
        for name, value in _whole_numbers(values):
            if abs(value) > MOST_OF_METHOD:
                yield Refused("policy", broken(f"{section}.{name}", f"be at most {MOST_OF_METHOD} here", value))
    known = policy.methods
    if known is not None and config.method["name"] not in known:
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
    yield from _refused_privacy(policy, config)


def _refused_privacy(policy: SitePolicy, config: Config) -> Iterator[Refused]:
    settings = config.privacy
    if settings is not None and settings.noise_at == "step":
        yield Refused("privacy", broken("privacy.noise_at", "be client or server where clients are sites", "step"))
    if (policy.least_noise or policy.evaluate == "noised") and config.federation.evaluate_at == "after_local":
        yield Refused("privacy", "federation.evaluate_at must not be after_local here: its figures are not noised")
    at_client = settings is not None and settings.noise_at == "client"
    noise = settings.noise if settings is not None and at_client else 0.0
    if noise is not None and noise < policy.least_noise:
        text = f"privacy must have noise_at: client and noise of at least {policy.least_noise:g} here, got {noise:g}"
        yield Refused("privacy", text)
    if policy.total_epsilon is not None and noise is not None and not noise:
        text = "privacy must have noise_at: client and noise above 0 here: this site counts what it gives away"
        yield Refused("budget", text)


def refused_method(policy: SitePolicy, config: Config, method: Method, world: World, client: int) -> Iterator[Refused]:
    """What the method breaks by what it declares and trains; asked before an image is looked at."""
    for name, statistic in sorted(world.roles.stat.items()):
        if statistic.count is not None and statistic.minimum < policy.least_count:
            rule = f"be withheld by the method where it is of fewer than {policy.least_count} images (minimum_count)"
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
    if (policy.least_noise or policy.evaluate == "noised") and any(map(_trains, fitting)):
        why = "federation.held_out" if held_out else f"method {config.label!r}"
        text = f"{why} must not fit anything to training images before an evaluation here: its figures would show them"
        yield Refused("privacy", text)
    if policy.evaluate == "noised" and world.roles.local and config.federation.evaluate_at != "global":
        text = (
            f"federation.evaluate_at must be global here for method {config.label!r}, or this site give no figures "
            "(evaluate: none): what it keeps was fitted to training images, which noise on counts does not hide"
        )
        yield Refused("privacy", text)


def _trains(stage: Stage) -> bool:
    return bool(stage.trainable) and stage.epochs > 0 and stage.steps != 0


def _whole_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every whole number among some settings, with the setting it is in."""
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
