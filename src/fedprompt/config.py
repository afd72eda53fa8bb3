"""The settings of an experiment: pydantic models, what is wrong with a value, and a stable hash.

This module must stay free of torch: the command line validates and prints configs without it. A method's own settings are the fields of its
dataclass; `fedprompt.registry.build` checks them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedprompt.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Bound = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=150, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]

SiteName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]


def _on_disk(value: str) -> str:
    """A name that a file system can have."""
    if "\0" in value or len(value) > 1024 or any(len(part.encode()) > 255 for part in value.split("/")):
        raise ValueError("be a path of at most 1024 letters, 255 bytes in each part, and no null character")
    return value


Location = Annotated[str, AfterValidator(_on_disk)]  #: a path, or a name that may be one


class Section(BaseModel):
    """Unknown keys are errors, and nothing is converted silently: the text "False" is not a boolean."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(Section):
    """Which images there are, and how they become squares."""

    source: Location = "embedded"  #: `embedded`, `tiny`, a folder, a parquet file, or `hub:owner/name`
    format: Literal["auto", "embedded", "tiny", "folder", "domain_folder", "parquet", "cifar10", "cifar100", "hub"] = (
        "auto"
    )
    classes: Annotated[list[str], Field(min_length=1)] | None = None  #: keep only these classes, in this order
    novel: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = (
        0.0  #: share of the classes, the last ones, that the federation never sees: it is tested on them at the end
    )
    per_domain: Positive | None = None  #: keep at most this many images of every domain, evenly over the classes
    train_per_cell: Positive | None = None  #: keep at most this many training images of every (domain, class)
    test_per_cell: Positive | None = None  #: the same for test images
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2  #: used when the source has no split of its own
    split_seed: NotNegative = 0  #: which images that split puts aside
    resize: Literal["squash", "crop"] = "squash"  #: to a square directly, or shorter side first and then the centre


class PartitionConfig(Section):
    """Which client holds which images."""

    scheme: Literal[
        "domains", "classes", "dirichlet", "dirichlet_in_domains", "disjoint", "label_subsets", "iid", "manifest"
    ] = "domains"
    clients: Positive = 6
    domains_per_client: Positive = 1  #: m of scheme `domains`
    classes_per_client: Positive = 2  #: s of scheme `classes`
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.3  #: concentration of the Dirichlet schemes
    subsets: Positive = 2  #: disjoint label subsets of scheme `label_subsets`
    subsets_per_client: Positive = 1  #: how many of them a client holds
    shots: Positive | None = None  #: training images per class of scheme `disjoint`; all when absent
    last_takes_rest: bool = (
        False  #: groups of scheme `disjoint` have round(C/N) classes, and the last client takes those that are left
    )
    min_train: Positive = 1  #: every client gets at least this many training images
    min_test: Positive = 1  #: and this many test images
    max_tries: Positive = 100  #: Dirichlet draws before giving up on the minimum sizes
    seed: NotNegative | None = None  #: defaults to the experiment's seed
    manifest: Location | None = None  #: the JSON file of scheme `manifest`


class BackboneConfig(Section):
    """The frozen model every client holds."""

    name: Location = "dinov2-small"  #: `dinov2-small`, `tiny`, a folder, a safetensors file, or a hub id
    image_size: Positive | None = None  #: side in pixels; the backbone's own when absent
    stem: NotNegative = 0  #: first blocks no prompt may reach: their output is kept where memory allows
    mean: tuple[float, float, float] | None = (
        None  #: only for weights that carry no preprocessing; checked when they do
    )
    std: tuple[float, float, float] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = (
        None  #: refuse a weight file with another checksum
    )
    revision: str | None = None  #: of a hub id
    device: Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] = "cpu"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    autocast: bool = False  #: multiply matrices in bfloat16, with weights and sums in `dtype`


class TrainConfig(Section):
    """Local training of one client in one round: SGD."""

    epochs: Positive = 1
    batch_size: Positive = 32
    lr: Rate = 0.01  #: of every tensor that has no rate of its own
    lrs: dict[
        str, Rate
    ] = {}  #: rates of parameter groups by name pattern, such as `head.*: 0.001`; the first match counts
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Rate = 0.0
    schedule: Literal["constant", "cosine", "local_cosine"] = (
        "constant"  #: a cosine over the rounds of the run, or over the steps of each participation
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = None  #: bound on the gradient norm of a step


class FederationConfig(Section):
    """Rounds, participation, aggregation and evaluation."""

    rounds: Positive = 10
    fraction: Share = 1.0  #: of the clients that train in a round
    sampling: Literal["fixed", "poisson"] = "fixed"  #: so many clients in every round, or each with that probability
    secure_sum: bool = False  #: the server sees only sums over the cohort, never one client's tensors
    weighting: Literal["samples", "uniform"] = "samples"
    evaluate_every: Positive = 1  #: rounds between evaluations of every client
    evaluate_last: NotNegative = 10  #: the last rounds are always evaluated, and averaged in the summary
    evaluate_at: Literal["personalised", "global", "after_local"] = "personalised"  #: see docs/concepts.md
    evaluation_batch: Positive = 64
    evaluate_clients: Positive | None = None  #: so many clients, drawn once, stand for all; all of them when absent
    held_out: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  #: share of the clients that never train; then only they are evaluated
    )
    newcomer_epochs: NotNegative = (
        5  #: epochs in which a held-out client fits its head (and what else its method says) first
    )
    away: dict[
        str, tuple[Positive, Positive]
    ] = {}  #: clients by name, and the first and last round in which each cannot be picked

    @field_validator("away")
    @classmethod
    def _in_order(cls, value: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        for name, (first, last) in value.items():
            if first > last:
                raise ValueError(f"give the first round before the last one ({name} has {first} and {last})")
        return value


class GuardConfig(Section):
    """What an update must be like before it is aggregated, and what happens to a round that loses too many."""

    quorum: Share = 0.5  #: of a cohort whose updates must be accepted for its round to count
    repeats: NotNegative = 1  #: how often a round without a quorum is tried again, with a cohort drawn anew
    norm: Bound | None = None  #: largest L2 norm of an update, all shared tensors together
    norm_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = (
        None  #: the same as a multiple of the median over the cohort
    )
    weight_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = (
        20.0  #: a client counts at most as this many times the cohort's median number of images
    )
    max_samples: Positive = 10_000_000  #: a client that says it has more images than this is not believed
    max_bytes: Positive | None = None  #: of one message; what the declared tensors weigh, and some room, when absent


class AggregationConfig(Section):
    """How the shared tensors of a cohort become one set. Every rule but the mean counts each client once."""

    rule: Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "clipped_mean"] = "mean"
    malicious: Annotated[float, Field(ge=0, lt=0.5)] = (
        0.2  #: share of a cohort that may be malicious: what trimmed_mean cuts off at each end, what krum reckons with
    )
    radius: Bound = 1.0  #: of clipped_mean: how far from the shared tensors an update may be before it is shortened


class AttackConfig(Section):
    """Clients that do not play by the rules, to see what a defence is worth. Only honest clients are evaluated."""

    kind: Literal["nan", "scale", "sign_flip", "label_flip", "forged_weight", "free_rider"]
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2  #: of the clients that take part in training
    strength: Annotated[float, Field(gt=0, le=1e12)] | None = (
        None  #: factor of `scale` (10) and `sign_flip` (1) on the update, of `forged_weight` on the images claimed (1000)
    )


class PrivacyConfig(Section):
    """Client-level differential privacy of what is uploaded."""

    noise_at: Literal["client", "server", "step"] = (
        "client"  #: on the update of every client; on their sum; or on the gradient of every training step
    )
    clip: Bound | None = 1.0  #: longest update (or gradient, with `step`) that is sent as it is; null for no bound
    clips: dict[str, Bound] = {}  #: bounds of statistics by name pattern, `clip` for those without
    noise: Rate | None = None  #: standard deviation of the noise, as a multiple of the bound
    target_epsilon: Annotated[float, Field(gt=0, le=1000)] | None = (
        None  #: instead of `noise`: the multiple that spends this epsilon in all rounds
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    max_epsilon: Bound | None = None  #: the run ends before the round that would spend more
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = (
        None  #: let the bound follow this quantile of the updates' norms; noise at the server only
    )
    quantile_rate: Bound = 0.2  #: how fast it follows

    @model_validator(mode="after")
    def _consistent(self) -> PrivacyConfig:
        if (self.noise is None) == (self.target_epsilon is None):
            raise ValueError("have either noise or target_epsilon")
        if self.clip is None and self.noise != 0:
            raise ValueError("have a clip unless noise is 0: noise is measured against it")
        if self.quantile is not None and (self.noise_at != "server" or self.clip is None):
            raise ValueError("have noise_at: server and a clip to start from where the clip follows a quantile")
        return self


PRIVACY_PRESETS: dict[str, dict[str, Any]] = {
    f"pfedmoap-{epsilon}": {"noise_at": "client", "target_epsilon": float(epsilon), "delta": 0.05}
    for epsilon in (25, 50)
}  #: Table 6 of pFedMoAP; its paper tells neither the bound nor how rounds add up


class OutputConfig(Section):
    """Where a run is written. Nothing here changes a result, so it is left out of the hash."""

    directory: Location = "runs"
    cache: Location | None = None  #: assets and decoded images; the user cache directory when absent
    threads: Positive | None = None  #: of torch; all cores when absent


class EngineConfig(Section):
    """How the work is done. It changes results by rounding at most, so it is left out of the hash."""

    kind: Literal["in-process", "flower-simulation", "flower"] = (
        "in-process"  #: clients in this process, as nodes that Flower simulates with Ray, or as sites that Flower connects
    )
    sites: list[SiteName] = []  #: of `flower`: the sites that take part, by name; those that are connected when absent
    deadline: Bound = 600.0  #: of `flower`: seconds a site has for its part of a round
    patience: Rate = 30.0  #: of `flower`: seconds a round waits for a site that is not connected
    cohort: Literal["auto"] | Positive = "auto"  #: clients trained as one batch: by the size of a step, or so many
    workers: NotNegative = (
        0  #: processes that share the clients of a round, one thread each; 0 for none but this one, or all cores of Ray
    )
    compile: bool = False  #: let torch.compile translate the frozen backbone
    memory_gib: Rate = 2.0  #: for un-prompted features that are kept in memory
    disk_gib: Rate = 8.0  #: for those kept in files of the cache, all runs together


class Config(Section):
    """A whole experiment."""

    name: Name = "run"
    seed: NotNegative = 0
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    backbone: BackboneConfig = BackboneConfig()
    method: dict[str, Any] = {"name": "fedvpt"}  #: `name` and the method's own fields
    variant: dict[str, Any] | None = None  #: FedProx, SCAFFOLD, ...: `name` and its fields
    train: TrainConfig = TrainConfig()
    federation: FederationConfig = FederationConfig()
    guard: GuardConfig = GuardConfig()
    aggregation: AggregationConfig = AggregationConfig()
    attack: AttackConfig | None = None  #: none when absent
    privacy: PrivacyConfig | None = None  #: none when absent; `pfedmoap-25` and `pfedmoap-50` are presets
    engine: EngineConfig = EngineConfig()
    output: OutputConfig = OutputConfig()

    @field_validator("method", "variant", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """`method: fedvpt` is short for `method: {name: fedvpt}`."""
        value = {"name": value} if isinstance(value, str) else value
        if isinstance(value, dict) and not isinstance(value.get("name"), str):
            raise ValueError("have a name")
        return value

    @field_validator("engine", mode="before")
    @classmethod
    def _kind(cls, value: Any) -> Any:
        """`engine: flower` is short for `engine: {kind: flower}`."""
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("privacy", mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        """`privacy: pfedmoap-25` is short for that preset's settings."""
        if not isinstance(value, str):
            return value
        if value not in PRIVACY_PRESETS:
            raise ValueError(f"be a section, or one of {', '.join(PRIVACY_PRESETS)}")
        return PRIVACY_PRESETS[value]

    def digest(self) -> str:
        """The identity of what is computed: equal digests give equal results, but for the rounding of another engine."""
        return _digest(self.model_dump(mode="json", exclude=set(NO_RESULT)))

    def family(self) -> str:
        """The digest without the seed: runs of one family are repetitions of each other."""
        return _digest(self.model_dump(mode="json", exclude={*NO_RESULT, "seed"}))

    @property
    def label(self) -> str:
        """How tables call it: `fedvpt`, or `fedvpt+fedprox`."""
        method = str(self.method.get("name", "?"))
        return f"{method}+{self.variant['name']}" if self.variant else method

    @property
    def run_name(self) -> str:
        return f"{self.name}-{self.label}-seed{self.seed}"

    @property
    def run_directory(self) -> Path:
        return Path(self.output.directory) / self.run_name


NO_RESULT = ("name", "engine", "output")  #: what does not decide on the result


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def parse(values: Mapping[str, Any]) -> Config:
    """Check a plain mapping; every complaint names its field, rule and value."""
    try:
        # the JSON round-trip lets strict mode accept lists where tuples are declared
        return Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(complaints(error, "")) from error
    except TypeError as error:
        raise ConfigError(f"config: only plain YAML values are understood: {error}") from error


def complaints(error: ValidationError, section: str) -> str:
    """The problems of a nested section (a method's own fields), one a line."""
    return "\n".join(_complaint(problem, section) for problem in error.errors())


def _complaint(problem: Any, section: str = "") -> str:
    field = ".".join([section, *map(str, problem["loc"])]).strip(".")
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{field} is not a known setting"
    if problem["type"] == "missing":
        return f"{field} must be given"
    rule = re.sub(r"^(Value error, |\w+ should )", "", problem["msg"])
    value = problem["input"]
    if problem["type"] in ("bool_type", "bool_parsing"):
        rule = "be true or false, without quotes"
    return f"{field} must {rule}, got {value!r}"


def difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The lines `field: old -> new` in which two config mappings differ."""
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += difference(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines
