"""The contract of every method.

A method is a frozen dataclass of settings plus pure functions over `dict[str, Tensor]`, written for *one* client. It overrides only what
differs from plain federated averaging. In the order in which a run calls them:

    check      refuse settings that cannot work together
    init       tensors at round 0, by role
    survey     the server after the `start` statistics (once, before round 1)
    download   what one client receives
    enrol      local tensors of a new client that differ from the declared ones
    begin      working parameters of a participation, from what was received and what is local
    stages     which tensors are trained, in which order, with whose step
      noise      every random draw of a step, made outside it
      prompts    what to insert into the frozen backbone
      later      what else to insert, computed when the pass reaches the block in `Prompts.pause`
      logits     read-out of what the backbone returned
      loss       one number
      after_step a correction of the optimiser's step
    finish     what goes up and what stays
    aggregate  the server's update
    personalise  parameters a client predicts with
    adaptation   stages run on a throw-away copy of them before an evaluation
    newcomer     the same for a client that was held out of the federation
    predict    class probabilities, one set per draw
    diagnostics  numbers that show how the method works
    mixtures     the parts of a prediction and their weights

The step is split around the backbone so that an engine can train many clients as one batch: `prompts`, `logits` and `loss` are mapped over
stacked parameters (`torch.func.vmap`), and the backbone between them gets a batch of images, each with its own tokens.

What is said of images holds for sentences where the backbone encodes those: a method does not know which of them it gets.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.core.pool import Pool
from fedprompt.core.recipe import Recipe
from fedprompt.core.roles import Roles
from fedprompt.core.search_space import SearchSpace
from fedprompt.errors import ConfigError, ContractError, broken
from fedprompt.modules import heads
from fedprompt.modules.contexts import Language, TextContext
from fedprompt.modules.insertion import WITHOUT_BLOCKS, PromptStart, TokenPrompt, initial_prompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, pick

if TYPE_CHECKING:
    from fedprompt.config import TrainConfig

FEW_CLASSES = 16  # below which torch takes a softmax over the last axis number by number


@dataclass(frozen=True)
class World:
    """What a method knows about the run; the same for every client and every round."""

    width: int
    """d, of a token."""
    blocks: int
    """L, transformer blocks."""
    tokens: int
    """T, rows of an item without prompts, CLS included. An item is an image, or a sentence of the longest kind."""
    patch: int
    """Side of a patch in pixels; what VPT's initial scale depends on."""
    class_names: tuple[str, ...]
    client_names: Sequence[str]
    newcomers: frozenset[int] = frozenset()
    """Clients held out: they never train, and only they are evaluated."""
    roles: Roles = field(default_factory=Roles)
    """As declared by `init`; empty while `init` runs."""
    language: Language | None = None
    """The text tower of a dual encoder."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    blank: Callable[[], Tensor] | None = None
    """What enters each block for nothing in particular, (L, d): the mean patch of a blank image, or the mean word; zeros when
    absent.
    """
    epochs: int = 1
    """E, local epochs of a round."""
    rounds: int = 1
    """R, rounds of the run."""
    frame: int = 0
    """Side of the images in pixels, as the backbone sees them, where something can be added to them (`Prompts.pixels`); 0
    where not: for sentences, behind a stem, or with a norm before block 0 (CLIP)."""
    operations: Mapping[str, int] = field(default_factory=dict)
    """Width of every operation whose output can be scaled and shifted (`Prompts.factors`)."""
    has_cls: bool = True
    """Row 0 of an item is a CLS token. Without one, all T rows are patches or words (SigLIP, sentences)."""

    def initial_prompt(self, kind: PromptStart, blocks: Sequence[int], tokens: int, generator: Stream) -> Tensor:
        """Initial prompts (len(blocks), tokens, d) of the listed blocks."""
        self.check_blocks()
        known = torch.zeros(self.blocks, self.width) if self.blank is None else self.blank()
        return initial_prompt(kind, known[list(blocks)], tokens, self.patch, generator)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def clients(self) -> int:
        return len(self.client_names)

    @cached_property
    def participants(self) -> Sequence[int]:
        """The clients that take part in training: all that are not held out."""
        return without(range(self.clients), self.newcomers)

    @property
    def text(self) -> Language:
        """The text tower; an error where the backbone has none."""
        require_text_tower(self.language is not None)
        assert self.language is not None
        return self.language

    def placed(self, tensors: Tensors) -> Tensors:
        """The tensors on the device and in the precision of the backbone."""
        return {name: tensor.to(self.device, self.dtype) for name, tensor in tensors.items()}

    def check_blocks(self) -> None:
        """Raise where the image tower has no blocks, and so no place for prompts or changed weights."""
        if not self.blocks:
            raise ConfigError(WITHOUT_BLOCKS)

    def check_depth(self, field: str, depth: int | None) -> None:
        """Raise unless that many blocks can be prompted; None stands for all."""
        self.check_blocks()
        if depth is not None and depth > self.blocks:
            raise ConfigError(broken(field, f"be at most the {self.blocks} blocks of the backbone", depth))


def require_text_tower(there: bool) -> None:
    """Raise unless the backbone has a text tower."""
    if not there:
        raise ConfigError(
            "backbone.name must be a dual encoder for a method that reads class names (`mini`, `b16`, or a CLIP folder or "
            "hub id), got one without a text tower"
        )


@dataclass(frozen=True)
class Batch:
    """Labels and un-prompted features of a step. Images and sentences never reach a method: the engine feeds them to the backbone."""

    labels: Tensor  # (B,)
    features: Tensors = field(default_factory=dict)
    """What the method `needs`."""
    weights: Tensor | None = None  # (B,); an engine that pads ragged batches gives the padding weight 0
    training: bool = True

    def mean(self, values: Tensor) -> Tensor:
        """Average per-sample values over the batch; losses use this so that padded samples do not count."""
        if self.weights is None:
            return values.mean()
        return (values * self.weights).sum() / self.weights.sum()


@dataclass(frozen=True)
class Prompts:
    """What `prompts` inserts into the backbone. If it inserts nothing, the cached un-prompted features are read."""

    tokens: tuple[TokenPrompt, ...] = ()
    """For the encoder of the items: beside the patches of images, or beside the words of sentences."""
    text: dict[str, TextContext] = field(default_factory=dict)
    """Contexts by name; their text features are in `Seen.text`."""
    repeat: int = 1
    """Every image goes in this many times, draw after draw: rows [draw 0 of all images, draw 1, ...]."""
    extra: Tensors = field(default_factory=dict)
    """Tensors that are passed on to `logits` and `loss`."""
    pause: int | None = None
    """Before this block the pass stops, and `later` is called for more prompts."""
    weights: Tensors = field(default_factory=dict)
    """Changes added to the frozen weights of that name, block 0 being the first promptable. `blocks.0.adapter.*` (`down`,
    `middle` and `up`, each with `weight` and `bias`) is a bottleneck beside the block, which adds to its output.
    """
    factors: Tensors = field(default_factory=dict)
    """A scale and a shift (B, 2, width) for the output of an operation, image by image, by the names of `World.operations`."""
    pixels: Tensor | None = None
    """(3, S, S), added to every normalised image, S being `World.frame`."""
    text_weights: Tensors = field(default_factory=dict)
    """The same for the text tower."""


@dataclass(frozen=True)
class Seen:
    """Output of the backbone: rows after its final norm, and unit vectors of a dual encoder's shared space. Only what the method reads."""

    cls: Tensor = field(default_factory=lambda: torch.empty(0))  # (repeat * B, d)
    patches: Tensor | None = None  # (repeat * B, M, d), when the method reads it
    prompts: Tensor | None = None  # (repeat * B, P, d), when the method reads it
    prompt_attention: Tensor | None = None  # (repeat * B, slots), attention of CLS, when the method reads it
    image: Tensor = field(default_factory=lambda: torch.empty(0))  # (repeat * B, D)
    image_raw: Tensor = field(default_factory=lambda: torch.empty(0))  # (repeat * B, D), before it is normalised
    image_patches: Tensor = field(default_factory=lambda: torch.empty(0))  # (repeat * B, M, D)
    text: Tensors = field(default_factory=dict)  # (C, D) of every context in `Prompts.text`
    extra: Tensors = field(default_factory=dict)
    """`Prompts.extra`, that of `later` included."""


@dataclass(frozen=True)
class Mixture:
    """Parts of the predictions of B images, such as experts, and their weights."""

    what: str
    """The parts, such as "class prompts"."""
    parts: tuple[str, ...]
    """Their names."""
    weights: Tensor  # (B, parts)
    unit: str = "share"
    """What the weights are."""
    used: Tensor | None = None  # (B, parts), true where a part was used; None: every part with a weight


@dataclass(frozen=True)
class Stage:
    """A part of local training. Optimiser state never outlives its stage."""

    step: Method
    """The method whose `noise`, `prompts`, `logits`, `loss` and `after_step` are used."""
    trainable: tuple[str, ...]
    epochs: int
    name: str = "local"
    """Keys the random streams: stages of the same name see the same batches."""
    steps: int | None = None
    """Stop after this many steps, even within an epoch."""
    share: tuple[float, float] = (0.0, 1.0)
    """Which part of the client's training images, as fractions from and to; the images have a fixed random order."""


@dataclass(frozen=True)
class Client:
    """The current client, as `enrol`, `begin` and `finish` see it."""

    index: int
    name: str
    round: int
    samples: int
    class_counts: Tensor  # (C,) of the training images
    loss: Callable[[Tensors], float]
    """Mean training loss of some parameters, without training (IFCA's choice)."""
    stream: Callable[[str], Stream]
    """Random draws of this client in this round, by purpose."""
    features: Callable[[str], tuple[Tensor, Tensor]] = lambda name: (torch.empty(0), torch.empty(0, dtype=torch.long))
    """Un-prompted features of its training images, by the names of `Method.needs`, and their labels (pFedPrompt's
    memory)."""


@dataclass(frozen=True)
class Progress:
    """What local training did, for update rules that need it (SCAFFOLD)."""

    steps: int
    step_sizes: dict[str, float]
    """Sum of the learning rates each tensor was stepped with."""


@dataclass(frozen=True)
class Server:
    """Everything the server holds. `own` may gain tensors over time; `pool` has a row for each client that sent one."""

    shared: Tensors
    own: Tensors
    round: int = 0
    pool: Pool = field(default_factory=Pool)

    def for_clients(self, clients: Sequence[int]) -> Server:
        """The same server, prepared for downloads to these clients: one pass over the pool then serves many of them."""
        return replace(self, pool=self.pool.for_clients(clients))


@dataclass(frozen=True)
class Upload:
    """What one client sent, after the audit."""

    client: int
    tensors: Tensors
    weight: float
    """Its share of the cohort; shares sum to one."""


class Combine(Protocol):
    """How tensors of a cohort become one set: a weighted mean unless `aggregation.rule` says otherwise.

    Clients of weight 0 do not take part. `around` holds the same tensors before the round, where there are any.
    """

    def __call__(
        self, tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None
    ) -> Tensors: ...


@dataclass(frozen=True)
class Method:
    """Plain federated averaging of the tensors that `init` declares as shared. See the module's docstring for the order of calls."""

    symbols: ClassVar[Mapping[str, str]] = {}
    """Symbols of the paper that configs may use for settings: symbol -> setting."""
    retired: ClassVar[Mapping[str, str]] = {}
    """Settings of earlier versions, with what to do instead: setting -> end of a sentence that starts "must"."""
    search_space: ClassVar[SearchSpace] = {}
    """What `fedprompt tune` tries beside the learning rates: `method.SETTING` (of a variant, `variant.SETTING`) -> range."""

    @property
    def recipe(self) -> Recipe:
        """Recommended optimiser and learning rates, which `train.lr: auto` takes."""
        return Recipe()

    @property
    def uses_text(self) -> bool:
        """Whether it needs a dual encoder."""
        return False

    @property
    def names_any_class(self) -> bool:
        """Whether it can classify classes it was not trained on, given only their names. False for a method that keeps
        anything by label; tensors with a row for each class are found by their declared shapes.
        """
        return self.uses_text

    @property
    def starts_as_received(self) -> bool:
        """Whether local training starts from the received shared tensors unchanged, as SCAFFOLD's correction assumes."""
        return True

    @property
    def weighs_evenly(self) -> bool:
        """Whether all clients of a cohort count the same in its averages, whatever `federation.weighting` is."""
        return False

    @property
    def sums_suffice(self) -> bool:
        """Whether `survey` and `aggregate` need of a cohort only the mean of its shared tensors and the sums of its statistics.

        If so, one upload can stand for the whole cohort and the server need not see any single one: secure sums and noise
        on sums are possible.
        """
        return True

    @property
    def mixes_passes(self) -> bool:
        """Whether `logits` joins several passes over an image (`Prompts.repeat`), so that no single one gives its predictions."""
        return False

    @property
    def mixed_batches(self) -> bool:
        """Whether every batch of an evaluation has to be a fair sample of the client's images, which lie in the source's order
        otherwise. For diagnostics that compare the images of a batch with each other.
        """
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """What `logits` reads of the prompted backbone: "cls", "patches" (or words), "prompts"; of a dual encoder also "image",
        "image_raw", "image_patches". "prompt_attention" is for `diagnostics`.
        """
        return ("cls",)

    @property
    def needs(self) -> tuple[str, ...]:
        """Un-prompted features of each image that the step uses.

        "cls" (B, d) and "patches" (B, M, d) after the last block and the final norm, "cls:q" (B, d) after the first q blocks and the final
        norm, "block_inputs" (B, L, T, d), "block_inputs:q" (B, q, T, d) of the first q blocks; of a dual encoder also "image" (B, D),
        "image_raw" (B, D), which is not normalised, and "image_patches" (B, M, D).
        """
        return ()

    def check(self, world: World, train: TrainConfig) -> None:
        """Raise ConfigError where the settings cannot work together."""

    def init(self, world: World, generator: Stream) -> Roles:
        raise NotImplementedError(f"{type(self).__name__}.init")

    def survey(self, world: World, server: Server, uploads: Sequence[Upload]) -> Server:
        return server

    def statistics(self, world: World, params: Tensors, batch: Batch, forward: Callable[[], Seen]) -> Tensors:
        """The declared statistics of one batch of training images; the engine adds the batches up. `forward` runs the prompted backbone."""
        return {}

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return server.shared

    def enrol(self, world: World, client: Client) -> Tensors:
        """Local tensors that depend on the client (its class prior); all others start as declared."""
        return {}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return {**received, **local}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        """Parameters the client predicts with; a method that predicts with its last trained prompt overrides this."""
        return self.begin(world, client, received, local)

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, (*world.roles.shared, *world.roles.local), train.epochs),)

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        return {}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return Prompts()

    def later(self, world: World, params: Tensors, cls: Tensor, batch: Batch, noise: Tensors) -> Prompts:
        """More prompts (`tokens` and `extra` count), given the CLS rows (repeat * B, d) that enter the block of `Prompts.pause`."""
        return Prompts()

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.logits")

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return batch.mean(cross_entropy(logits, batch.labels))

    def after_step(self, world: World, params: Tensors, before: Tensors, step: int) -> Tensors:
        """Trainables after step number `step` of the stage, given all parameters before it; default: as the optimiser left them."""
        return params

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        """What goes up (without `statistics`, which the engine adds) and what the client keeps."""
        return pick(params, world.roles.shared), pick(params, world.roles.local)

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        tensors = [pick(upload.tensors, server.shared) for upload in uploads]
        return replace(server, shared=combine(tensors, [upload.weight for upload in uploads], server.shared))

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return ()

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        """How a held-out client adapts the received tensors before it is evaluated: by tuning the head."""
        declared = {**world.roles.shared, **world.roles.local}
        return (Stage(self, tuple(name for name in heads.NAMES if name in declared), epochs, "newcomer"),)

    def predict(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        """Probabilities (V, B, C) of V draws; the federation averages them and derives the uncertainty."""
        return probabilities(self.logits(world, params, seen, batch, noise)).unsqueeze(0)

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        """Numbers that show how the method works, such as its attention: one for all images of a batch, or one for each (B,).
        The engine averages them.
        """
        return {}

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        """The parts of the predictions of a batch: experts, groups, class prompts. Used by explanations, not in a run."""
        return ()


def without(clients: Sequence[int], some: Collection[int]) -> Sequence[int]:
    """The clients that are not in `some`, in a few bytes each."""
    return array("q", (client for client in clients if client not in some)) if some else clients


def shares(sizes: Sequence[float]) -> list[float]:
    """Non-negative weights that sum to one, in proportion to the sizes; clients without samples get nothing."""
    if any(not size >= 0 for size in sizes):
        raise ContractError(broken("aggregation weights", "be at least 0", list(sizes)))
    total = sum(sizes)
    if not 0 < total < float("inf"):
        raise ContractError(broken("aggregation weights", "have a positive, finite sum", list(sizes)))
    return [size / total for size in sizes]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """One number per image (B,). Torch's own gives the same but is slow when it is mapped over clients.

    Few classes are filled up with classes of probability 0: torch takes a softmax over fewer number by number.
    """
    lacking = FEW_CLASSES - logits.shape[-1]
    if lacking > 0:
        logits = F.pad(logits, (0, lacking), value=-torch.inf)
    return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over classes in at least float32: in bfloat16 close probabilities become equal."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
