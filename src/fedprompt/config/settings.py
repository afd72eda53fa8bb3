"""The settings of an experiment: pydantic models, what is wrong with a value, and a stable hash.

This module must stay free of torch: the command line validates and prints configs without it. A method's own settings are the fields of its
dataclass; `fedprompt.core.registry.build` checks them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedprompt.config.complaints import UnknownName, complaints
from fedprompt.config.protection_settings import (
    PRIVACY_PRESETS,
    AggregationConfig,
    AttackConfig,
    GuardConfig,
    PrivacyConfig,
)
from fedprompt.config.registries import BACKBONES, ENGINES, PARTITIONS, REMOTE_ENGINES, SOURCES, TRACKERS, In
from fedprompt.config.setting_types import (
    MOST_EPOCHS,
    MOST_ROUNDS,
    Auto,
    Bound,
    Decay,
    DeviceName,
    Extensible,
    Grown,
    Location,
    Name,
    NotNegative,
    Positive,
    Rate,
    RelativeRate,
    ScheduleName,
    Section,
    Share,
    SiteName,
    ValidationSize,
)
from fedprompt.errors import ConfigError, broken, same_name


class DataConfig(Extensible):
    """Which images there are, and how they become squares."""

    later: ClassVar[tuple[str, ...]] = ("options", "validation", "unseen_domain", "other_set", "imbalance")

    source: Location = "embedded"
    """Where the images come from: `groceries`, `xrays`, `embedded`, `tiny`, a folder, a parquet file, or `hub:owner/name`."""
    format: Annotated[str, In(SOURCES)] = "auto"
    """How the source is read. `auto` finds out from the source itself."""
    classes: Annotated[list[str], Field(min_length=1)] | None = None
    """Keep only these classes, in this order. All when absent."""
    novel: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Share of the classes, counted from the last, that are kept out of the federation. It is tested on them at the end."""
    other_set: Location | None = None
    """Another source, such as `source`. At the end every client is tested on its test images, by their class names."""
    unseen_domain: str | None = None
    """A domain that no client trains on: every client is tested on its test images, and on no others."""
    imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Training images of the first class for each one of the last: a long tail. Classes stay as they are when absent."""
    per_domain: Positive | None = None
    """Keep at most this many images of every domain, spread evenly over the classes. All when absent."""
    train_per_cell: Positive | None = None
    """Keep at most this many training images of every pair of domain and class. All when absent."""
    test_per_cell: Positive | None = None
    """Keep at most this many test images of every pair of domain and class. All when absent."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the images that become test images, where the source has no split of its own."""
    split_seed: NotNegative = 0
    """Seed that chooses those test images, and the validation images."""
    validation: ValidationSize = None
    """Training images of each client that become validation images: a share, or a number per domain and class. None when absent."""
    resize: Literal["squash", "crop"] = "squash"
    """How an image becomes a square: `squash` ignores its proportions, `crop` keeps the centre."""
    options: dict[str, Any] = {}
    """Settings of a `format` that is not of this package; see docs/extending.md."""

    @property
    def tests_names(self) -> bool:
        """Whether a run ends with a test on classes that it did not train on."""
        return bool(self.novel) or self.other_set is not None

    @model_validator(mode="after")
    def _one_test_of_names(self) -> DataConfig:
        if self.novel and self.other_set is not None:
            raise ValueError(broken("data.other_set", "be absent where data.novel keeps classes apart", self.other_set))
        return self


class PartitionConfig(Extensible):
    """Which client holds which images."""

    scheme: Annotated[str, In(PARTITIONS)] = "domains"
    """How images are divided among clients. See docs/data.md."""
    clients: Positive = 6
    """Number of clients."""
    domains_per_client: Positive = 1
    """Domains that each client holds, with scheme `domains`."""
    classes_per_client: Positive = 2
    """Classes that each client holds, with scheme `classes`."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.3
    """Concentration of the Dirichlet schemes. Smaller values make clients less alike."""
    subsets: Positive = 2
    """Number of disjoint subsets of the classes, with scheme `label_subsets`."""
    subsets_per_client: Positive = 1
    """Number of these subsets that each client holds, with scheme `label_subsets`."""
    shots: Positive | None = None
    """Training images per class, with scheme `disjoint`. All when absent."""
    last_takes_rest: bool = False
    """With scheme `disjoint`, every client gets round(classes / clients) classes, and the last one all others."""
    min_train: Positive = 1
    """Smallest number of training images that every client must get."""
    min_test: Positive = 1
    """Smallest number of test images that every client must get."""
    max_tries: Positive = 100
    """Number of Dirichlet draws before giving up on the smallest numbers of images."""
    seed: NotNegative | None = None
    """Seed of the partition. The seed of the experiment when absent."""
    manifest: Location | None = None
    """Path of the JSON file that lists the images of each client, with scheme `manifest`."""
    options: dict[str, Any] = {}
    """Settings of a `scheme` that is not of this package."""


class BackboneConfig(Extensible):
    """The frozen model every client holds."""

    later: ClassVar[tuple[str, ...]] = ("options", "max_tokens")

    name: Location = "dinov2-small"
    """The frozen model: a name from `fedprompt backbones`, a folder, a safetensors file, or a hub id."""
    image_size: Positive | None = None
    """Side of the images in pixels. When absent, the backbone's own, or about 100 pixels on a CPU."""
    max_tokens: Positive | None = None
    """Longest sentence in tokens, for an encoder of sentences; longer ones are cut. 64 when absent."""
    stem: NotNegative = 0
    """Number of first blocks that no prompt may enter. Their output is kept where memory allows."""
    mean: tuple[float, float, float] | None = None
    """Mean of each colour channel. Needed for weights without preprocessing; else it must be theirs."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of each colour channel. Needed for weights without preprocessing; else it must be theirs."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Checksum of the weight file. A file with another checksum is refused."""
    revision: str | None = None
    """Revision of a hub id: a branch, a tag or a commit."""
    device: DeviceName = "cpu"
    """Device that computes: `cpu`, `mps`, `cuda` or `cuda:0`."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of weights and activations."""
    autocast: bool = False
    """Multiply matrices in bfloat16, but keep weights and sums in `dtype`."""
    options: dict[str, Any] = {}
    """Settings of a backbone that is not of this package."""

    @field_validator("name")
    @classmethod
    def _spelled(cls, value: str) -> str:
        """`DINOv2-small` is `dinov2-small`, unless a folder is called so."""
        return value if Path(value).exists() else same_name(value, BACKBONES.fixed) or value


class TrainConfig(Grown):
    """Local training of one client in one round."""

    later: ClassVar[tuple[str, ...]] = (
        "optimizer",
        "betas",
        "schedules",
        "warmup_epochs",
        "warmup_lr",
        "random_crop",
        "random_flip",
    )

    epochs: Annotated[int, Field(ge=1, le=MOST_EPOCHS)] = 1
    """Passes over a client's training images in one round."""
    batch_size: Positive = 32
    """Images in one training step."""
    optimizer: Literal["sgd", "adam", "adamw"] | Auto = "auto"
    """Optimiser. `auto` is the one the method recommends, or SGD where `lr` is a number. Its state ends with the round."""
    lr: Rate | Auto = "auto"
    """Learning rate of every tensor that `lrs` does not name. `auto` takes the rates the method recommends."""
    lrs: dict[str, Rate | RelativeRate] = {}
    """Learning rates by name pattern of tensors: `head.*: 0.001`, or a share of their size: `context: 30%`. The first match counts."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Momentum of SGD. `auto` is what the method recommends, or 0.9 where `lr` is a number."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the two moments of Adam and AdamW."""
    weight_decay: Rate = 0.0
    """Weight decay: in the gradient of SGD and Adam, beside it with AdamW."""
    schedule: ScheduleName | Auto = "auto"
    """Learning rate over time: constant, a cosine over the rounds, or one over the steps of each participation."""
    schedules: dict[str, ScheduleName] = {}
    """Schedules by name pattern of tensors, such as `head.*: cosine`. The first pattern that matches counts."""
    warmup_epochs: NotNegative = 0
    """Epochs of warm-up: at the start of the run, or of every participation with `local_cosine`."""
    warmup_lr: Rate | None = None
    """Learning rate during the warm-up. When absent, the rate grows linearly from 0."""
    clip_norm: Annotated[float, Field(gt=0)] | Auto | None = "auto"
    """Largest norm of the gradient of each group of tensors (head, prompt, gate, ...) in a step. Null for no bound."""
    random_crop: Share | None = None
    """Train on random resized crops that keep at least this share of an image's area. Whole images when absent."""
    random_flip: Share | None = None
    """Probability with which a training image is mirrored, left to right. Never when absent."""

    @property
    def augmented(self) -> bool:
        """Whether training images are new in every step, so that their features cannot be stored."""
        return self.random_crop is not None or self.random_flip is not None


class FederationConfig(Grown):
    """Rounds, participation, aggregation and evaluation."""

    later: ClassVar[tuple[str, ...]] = (
        "evaluate_on",
        "select",
        "patience",
        "never_picked",
        "test_classes",
        "staleness",
        "late_rounds",
    )

    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 10
    """Number of rounds."""
    fraction: Share = 1.0
    """Share of the clients that train in one round."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """Who trains in a round: a fixed number of clients, or each client with probability `fraction`."""
    secure_sum: bool = False
    """Hide single updates from the server: it learns only their sum."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How updates are weighted in the average: by the number of training images, or all equally."""
    test_classes: Literal["all", "own"] = "all"
    """Classes among which a client's test images are classified: all, or only those of its own training images."""
    evaluate_every: Positive = 1
    """Number of rounds from one evaluation to the next."""
    evaluate_last: NotNegative | Auto = "auto"
    """Number of last rounds that are all evaluated. The summary averages them. `auto`: a third of the rounds, at most 10."""
    evaluate_at: Literal["personalised", "global", "after_local"] = "personalised"
    """Which parameters of a client are evaluated, and when. See docs/concepts.md."""
    evaluate_on: Literal["test", "validation"] = "test"
    """Images of the evaluations in rounds. With `validation`, test images are read once, after the last round."""
    select: Literal["last", "best"] = "last"
    """Round whose parameters are tested at the end: the last one, or the one with the best Average on validation images."""
    patience: Positive | None = None
    """End the run after this many rounds without a better Average on validation images. All rounds when absent."""
    evaluation_batch: Positive = 64
    """Images in one batch of an evaluation."""
    evaluate_clients: Positive | None = None
    """Number of clients that are evaluated; they are drawn once. All when absent."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the clients that never train. When above 0, only these are evaluated."""
    newcomer_epochs: Annotated[int, Field(ge=0, le=MOST_EPOCHS)] = 5
    """Epochs for which a held-out client fits its head, or what else its method says, before it is evaluated."""
    never_picked: Literal["apart", "fit"] = "apart"
    """Clients that never trained have an untrained local head. Show the figures of all others too, or fit that head."""
    away: dict[str, tuple[Positive, Positive]] = {}
    """Clients by name, each with the first and the last round in which it cannot be drawn."""
    staleness: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With sites, the share of its weight that an update keeps for every round it is late (docs/operate.md). 0 drops late ones."""
    late_rounds: Positive = 3
    """With `staleness`, the number of rounds for which a late update is waited for; then its site begins anew."""

    @property
    def last_rounds(self) -> int:
        """`evaluate_last` as a number."""
        return max(1, min(10, self.rounds // 3)) if self.evaluate_last == "auto" else self.evaluate_last

    @field_validator("away")
    @classmethod
    def _in_order(cls, value: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        for name, (first, last) in value.items():
            if first > last:
                raise ValueError(f"give the first round before the last one ({name} has {first} and {last})")
        return value

    @model_validator(mode="after")
    def _choosing_needs_validation(self) -> FederationConfig:
        if self.evaluate_on == "test" and (self.select == "best" or self.patience is not None):
            raise ValueError(
                "have evaluate_on: validation where select is best or patience is given: no round may be chosen on test images"
            )
        if self.staleness and self.secure_sum:
            raise ValueError("have staleness: 0 with secure_sum: a sum cannot be split by age")
        return self


class OutputConfig(Grown):
    """Where a run is written. Nothing here changes a result, so it is left out of the hash."""

    later: ClassVar[tuple[str, ...]] = ("trackers",)

    directory: Location = "runs"
    """Folder in which every run gets a folder of its own."""
    cache: Location | None = None
    """Folder for assets, decoded images and features. The user's cache folder when absent."""
    threads: Positive | None = None
    """Number of threads of torch. All cores when absent."""
    trackers: list[Annotated[str, In(TRACKERS)]] = []
    """Where the figures of every round go beside the run file: `tensorboard`, `mlflow`, `wandb`."""


class EngineConfig(Extensible):
    """How the work is done. It changes results by rounding at most, so it is left out of the hash."""

    later: ClassVar[tuple[str, ...]] = ("options", "devices", "recompute")

    kind: Annotated[str, In(ENGINES)] = "in-process"
    """Where clients run: in this process, as nodes that Flower simulates with Ray, or as sites that Flower connects."""
    sites: list[SiteName] = []
    """With `flower`, the names of the sites that take part. When empty, those that are connected."""
    deadline: Bound = 600.0
    """With `flower`, seconds that a site has for its part of a round."""
    patience: Rate = 30.0
    """With `flower`, seconds that a round waits for a site that is not connected."""
    cohort: Literal["auto"] | Positive = "auto"
    """Number of clients trained as one batch. `auto` chooses by the size of a step."""
    workers: NotNegative = 0
    """Processes for the clients of a round, one thread each. 0: this one, or all cores with `flower-simulation`."""
    devices: list[DeviceName] = []
    """Devices of the worker processes, such as `cuda:0` and `cuda:1`, in turn. Without `workers`, one process for each."""
    compile: bool | Literal["step"] = False
    """Compile the frozen backbone with torch.compile; `step`: whole training steps, gradients included, one graph for every
    shape of a batch. Steps of methods that change weights, and those torch cannot compile, run as they are."""
    recompute: bool = False
    """Compute activations again for the gradients instead of storing them: a batch takes a fraction of the memory and a third
    more time. With a larger `cohort` more clients share a pass where memory is scarce."""
    memory_gib: Rate = 2.0
    """Memory in GiB for features of images without prompts."""
    disk_gib: Rate = 8.0
    """Disk space in GiB for files with such features in the cache, all runs together."""
    cache_dtype: Literal["same", "bfloat16"] = "same"
    """Precision of stored features: the backbone's, or bfloat16, which takes half the room of float32 and rounds to 3 digits."""
    options: dict[str, Any] = {}
    """Settings of a `kind` that is not of this package."""

    @model_validator(mode="after")
    def _devices_are_those_of_workers(self) -> EngineConfig:
        if self.devices and self.kind in REMOTE_ENGINES:
            raise ValueError(f"have no devices with kind {self.kind}: each node has the device it was started with")
        return self


class TunedConfig(Section):
    """How the settings of a config were found. `fedprompt tune` writes it; it changes no result and is left out of the hash."""

    study: str
    """Name of the study."""
    trials: NotNegative
    """Trials the method was given."""
    pruned: NotNegative = 0
    """Trials among them that ended early because others were better."""
    diverged: NotNegative = 0
    """Trials among them that ended early because training diverged."""
    rounds: NotNegative
    """Rounds that all trials trained together."""
    seconds: Rate
    """Time that all trials took together."""
    image_passes: NotNegative
    """Training images that went through the model in all trials together, each as often as it did."""
    seed: NotNegative
    """Seed of the search."""
    objective: str
    """What was compared."""
    value: float
    """The objective of the chosen trial."""
    validation: float
    """Setting `data.validation` of the trials."""
    data: str
    """Fingerprint of the images."""
    fedprompt: str
    """Version that ran the trials."""
    chosen: dict[str, Any]
    """The settings that were tried, with the values that were chosen."""


SHORTHANDS = {"data": "source", "backbone": "name", "engine": "kind", "method": "name", "variant": "name"}


def as_section(name: str, value: Any) -> Any:
    """A section as a mapping: `data: PATH` is short for `data: {source: PATH}`."""
    return {SHORTHANDS[name]: value} if name in SHORTHANDS and isinstance(value, str) else value


class Config(Grown):
    """A whole experiment."""

    later: ClassVar[tuple[str, ...]] = ("tuned",)

    name: Name = "run"
    """First part of the names of runs. The name of the file when absent."""
    seed: NotNegative = 0
    """Seed of everything random in a run."""
    data: DataConfig = DataConfig()
    """Which images there are, and how they become squares: settings, or only the `source`."""
    partition: PartitionConfig = PartitionConfig()
    """Which client holds which images."""
    backbone: BackboneConfig = BackboneConfig()
    """The frozen model that every client holds: settings, or only the `name`."""
    method: dict[str, Any] = {"name": "fedvpt"}
    """The method: `name`, and its own settings. See `fedprompt methods NAME`."""
    variant: dict[str, Any] | None = None
    """A variant around the method, such as `fedprox`: `name`, and its own settings. None when absent."""
    train: TrainConfig = TrainConfig()
    """Local training of one client in one round."""
    federation: FederationConfig = FederationConfig()
    """Rounds, participation, aggregation and evaluation."""
    guard: GuardConfig = GuardConfig()
    """What an update must be like before it is aggregated."""
    aggregation: AggregationConfig = AggregationConfig()
    """How the updates of a round become one."""
    attack: AttackConfig | None = None
    """Malicious clients, to see what a defence is worth. None when absent."""
    privacy: PrivacyConfig | None = None
    """Differential privacy of uploads: settings, or a preset (`pfedmoap-25`, `pfedmoap-50`). None when absent."""
    engine: EngineConfig = EngineConfig()
    """How the work is done: settings, or only the `kind`."""
    output: OutputConfig = OutputConfig()
    """Where runs are written."""
    tuned: TunedConfig | None = None
    """How `fedprompt tune` found these settings. Reports say it. None when absent."""

    @field_validator("method", "variant", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, dict) and not isinstance(value.get("name"), str):
            raise ValueError("have a name")
        return value

    @field_validator("privacy", mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        """`privacy: pfedmoap-25` is short for that preset's settings."""
        if not isinstance(value, str):
            return value
        if value not in PRIVACY_PRESETS:
            raise UnknownName(f"be a section, or one of {', '.join(PRIVACY_PRESETS)}", PRIVACY_PRESETS)
        return PRIVACY_PRESETS[value]

    @field_validator("aggregation")
    @classmethod
    def _weighs(cls, value: AggregationConfig, info: ValidationInfo) -> AggregationConfig:
        federation = info.data.get("federation")
        if federation is not None and federation.staleness and value.rule != "mean":
            raise ValueError("have rule: mean with federation.staleness above 0: other rules count each client in full")
        return value

    @field_validator("privacy")
    @classmethod
    def _in_time(cls, value: PrivacyConfig | None, info: ValidationInfo) -> PrivacyConfig | None:
        federation = info.data.get("federation")
        if value is not None and federation is not None and federation.staleness:
            raise ValueError(
                "be absent with federation.staleness above 0: a private update counts in its own round only"
            )
        return value

    @field_validator("federation")
    @classmethod
    def _has_validation_images(cls, value: FederationConfig, info: ValidationInfo) -> FederationConfig:
        data, partition = info.data.get("data"), info.data.get("partition")
        given = data is None or partition is None or data.validation is not None or partition.scheme == "manifest"
        if value.evaluate_on == "validation" and not given:
            raise ValueError("have evaluate_on: test unless data.validation is given, such as 0.2")
        return value

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


NO_RESULT = ("name", "engine", "output", "tuned")  # what does not decide on the result


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def parse(values: Mapping[str, Any], check_names: bool = True) -> Config:
    """Check a plain mapping; every complaint names its field, rule and value.

    A config that was checked elsewhere, and of which not everything is needed here, can do without `check_names`: it may
    name things that only the process it comes from knows.
    """
    try:
        # the JSON round-trip lets strict mode accept lists where tuples are declared
        sections = {name: as_section(name, value) for name, value in values.items()}
        return Config.model_validate_json(json.dumps(sections), context={"unchecked_names": not check_names})
    except ValidationError as error:
        raise ConfigError(complaints(error, "", Config)) from error
    except TypeError as error:
        raise ConfigError(f"config: only plain YAML values are understood: {error}") from error
