"""The fit of a bridge, in closed form: every name is sent to the place where the pictures of its thing are.

1. Whitened picture space. With S the covariance of pictures around the mean of their thing (within one look: photograph,
   plain, placed or line-drawn emoji), plus the covariance of the looks themselves, z = H (x - mu), H = (S + s tr(S)/d I)^(-1/2).
   What tells pictures of one thing apart, and what tells a drawing from a photograph, counts little there.
2. Places of names. A thing lies at the mean of its pictures, looks taken out; a name at the mean of the things that carry it.
   A name of WordNet without pictures lies where its kind does, m(k) = (sum of the things below k + c m(parent)) / (count + c).
3. Text map. Ridge regression of those places on f(t) = [t ; gelu(R t + b) ; 1] with fixed random R, b, each name being read behind
   all contexts, and with noise of the size of what a context does to a state.
4. Both sides are turned to the first D principal axes of what the text map can say; the rest of the picture space is of no use.

Regression from names to pictures, not the other way: with many names to choose from it suffers less from names that are near to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from wordnet import VISIBLE, Nouns

PHOTO = 0  # the look of photographs; those of emoji are counted from 1


@dataclass(frozen=True)
class Settings:
    """Chosen on held-out names of TinyImageNet and of the emoji."""

    features: int = 384  # D
    shrinkage: float = 0.3  # s
    emoji_weight: float = 0.3  # of an emoji among the things
    emoji_share: float = 0.2  # of emoji in the covariance of pictures
    looks_weight: float = 0.3  # of the covariance of looks
    kind_weight: float = 1.0  # c
    tree_weight: float = 0.5  # of all names of WordNet together, where all other names weigh 1
    tree_decay: float = 0.4  # with every step from a name up to a kind that has pictures
    ridge: float = 1.0
    hidden: int = 384
    draws: int = 2  # of the noise of contexts


@dataclass(frozen=True)
class Thing:
    """A class of pictures."""

    name: str
    alternative: tuple[str, ...]
    coarse: tuple[str, ...]  # names of its kind
    synset: int | None
    drawn: bool  # an emoji

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.alternative, *self.coarse)


@dataclass(frozen=True)
class Pictures:
    rows: Tensor  # (n, d_in)
    things: Tensor  # (n,)
    looks: Tensor  # (n,)

    def of(self, kept: Tensor) -> Pictures:
        """The pictures of some things, told by a mask over all things."""
        chosen = kept[self.things]
        return Pictures(self.rows[chosen], self.things[chosen], self.looks[chosen])


@dataclass(frozen=True)
class Texts:
    """Names of things with their states behind every context, and names of WordNet with their states behind two."""

    names: list[str]
    states: Tensor  # (V, K, 384); the first contexts are "" and "a photo of a"
    tree_names: list[tuple[str, int]]
    tree_states: Tensor  # (W, 384), means over those two contexts

    @cached_property
    def at(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def close(self) -> Tensor:
        """(V, V), which names are nearly the same."""
        centred = F.normalize(self.states[:, 0] - self.states[:, 0].mean(0), dim=-1)
        return centred @ centred.T > 0.8


def carriers(things: Sequence[Thing], texts: Texts) -> Tensor:
    """(things, V): which thing carries which name."""
    found = torch.zeros(len(things), len(texts.names), dtype=torch.bool)
    for row, thing in enumerate(things):
        found[row, [texts.at[name] for name in thing.names]] = True
    return found


def fit(
    pictures: Pictures,
    things: Sequence[Thing],
    texts: Texts,
    nouns: Nouns,
    allowed: Tensor,
    in_tree: Callable[[str], bool],
    settings: Settings,
    seed: int,
    before: Tensor | None = None,
) -> dict[str, Tensor]:
    """A bridge without its scale, from pictures, from those names of things that are allowed and from names of WordNet.

    `before` is a fixed linear map that images pass first (CLIP's own projection); it is folded into the image side.
    """
    rows = pictures.rows if before is None else pictures.rows @ before.T
    present = pictures.things.unique()
    weights = torch.tensor([settings.emoji_weight if things[at].drawn else 1.0 for at in present.tolist()])
    whitening, centre, places = _picture_space(rows, pictures, present, settings)

    carried = (carriers(things, texts)[present] & allowed).float()
    used = torch.nonzero(carried.any(0))[:, 0]
    shares = carried[:, used] * weights[:, None]
    targets = (shares / shares.sum(0)).T @ places
    drawn_only = ~carried[weights == 1][:, used].any(0)
    importance = torch.where(drawn_only, settings.emoji_weight, 1.0)
    states = texts.states[used]
    means = states.mean(1)
    middle = means.mean(0)
    spread = (means - middle).var(0).mean().sqrt()
    noise = ((states - means[:, None]) / spread).flatten(0, 1)

    chosen = [at for at, (name, _) in enumerate(texts.tree_names) if in_tree(name)]
    kinds = _Kinds(places, [things[at].synset for at in present.tolist()], weights, nouns, settings.kind_weight)
    found = [kinds.place(texts.tree_names[at][1]) for at in chosen]
    decayed = settings.tree_decay ** torch.tensor([float(steps) for _, steps in found])
    shift = (means - states[:, :2].mean(1)).mean(0)  # from two contexts to all
    inputs = (torch.cat([means, texts.tree_states[chosen] + shift]) - middle) / spread
    targets = torch.cat([targets, torch.stack([place for place, _ in found])])
    importance = torch.cat([importance, settings.tree_weight * importance.sum() * decayed / decayed.sum()])

    text = _text_map(inputs, targets, importance / importance.sum(), noise.T @ noise / len(noise), settings, seed)
    said = text(inputs) * (importance / importance.sum()).sqrt()[:, None]
    axes = torch.linalg.eigh(said.T @ said)[1][:, -settings.features :].flip(1)
    image = axes.T @ whitening
    image = image if before is None else image @ before
    offset = axes.T @ (whitening @ centre)
    size = image.square().mean().sqrt()
    bridge = {"image.linear.weight": image / size, "image.linear.bias": -offset / size}
    return bridge | text.turned(axes, middle, spread)


def _picture_space(
    rows: Tensor, pictures: Pictures, present: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Whitening H, centre mu, and the places of the things that are present."""
    looks = pictures.looks.unique()
    means = torch.stack([rows[pictures.looks == forward].mean(0) for forward in looks])
    plain = rows - means[torch.searchsorted(looks, pictures.looks)]
    index = torch.searchsorted(present, pictures.things)
    places = torch.zeros(len(present), rows.shape[1]).index_add(0, index, plain)
    places = places / torch.bincount(index)[:, None]
    rest = plain - places[index]
    photo = pictures.looks == PHOTO
    covariance = rest[photo].T @ rest[photo] / photo.sum()
    if not bool(photo.all()):
        drawn = rest[~photo].T @ rest[~photo] / (~photo).sum()
        between = means[1:] - means[0]
        covariance = (1 - settings.emoji_share) * covariance + settings.emoji_share * drawn
        covariance = covariance + settings.looks_weight * between.T @ between / len(between)
    floor = settings.shrinkage * covariance.trace() / len(covariance)
    values, vectors = torch.linalg.eigh(covariance + floor * torch.eye(len(covariance)))
    whitening = vectors @ torch.diag(values**-0.5) @ vectors.T
    return whitening, means.mean(0), places @ whitening


class _Kinds:
    """Where the kinds of WordNet lie."""

    def __init__(
        self, places: Tensor, synsets: Sequence[int | None], weights: Tensor, nouns: Nouns, kind_weight: float
    ) -> None:
        self._nouns, self._kind_weight = nouns, kind_weight
        self._nowhere = torch.zeros(places.shape[1])
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, float] = {}
        self._known: dict[int, tuple[Tensor, int]] = {}
        for place, synset, weight in zip(places, synsets, weights.tolist(), strict=True):
            for kind in [] if synset is None else [synset, *nouns.ancestors(synset)]:
                self._sums[kind] = self._sums.get(kind, self._nowhere) + weight * place
                self._counts[kind] = self._counts.get(kind, 0.0) + weight

    def place(self, synset: int) -> tuple[Tensor, int]:
        """Its place, and how many steps above it the pictures begin."""
        if synset not in self._known:
            above = [] if synset in VISIBLE else [self.place(parent) for parent in self._nouns.parents[synset]]
            parent = torch.stack([place for place, _ in above]).mean(0) if above else self._nowhere
            if synset in self._counts:
                total = self._sums[synset] + self._kind_weight * parent
                self._known[synset] = total / (self._counts[synset] + self._kind_weight), 0
            else:
                self._known[synset] = parent, 1 + min((steps for _, steps in above), default=9)
        return self._known[synset]


@dataclass(frozen=True)
class _TextMap:
    """t -> W t + V gelu(R t + b) + c, for states that are centred and scaled."""

    linear: Tensor
    output: Tensor
    constant: Tensor
    hidden: Tensor
    bias: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        return states @ self.linear.T + F.gelu(states @ self.hidden.T + self.bias) @ self.output.T + self.constant

    def turned(self, axes: Tensor, middle: Tensor, spread: Tensor) -> dict[str, Tensor]:
        """The tensors for raw states, in the turned space; only the direction of the result counts."""
        linear, output, constant = axes.T @ self.linear / spread, axes.T @ self.output, axes.T @ self.constant
        size = linear.square().mean().sqrt()
        return {
            "text.linear.weight": linear / size,
            "text.linear.bias": (constant - linear @ middle) / size,
            "text.hidden.weight": self.hidden / spread,
            "text.hidden.bias": self.bias - self.hidden @ middle / spread,
            "text.output.weight": output / size,
            "text.output.bias": torch.zeros(len(output)),
        }


def _text_map(
    inputs: Tensor, targets: Tensor, weights: Tensor, noise: Tensor, settings: Settings, seed: int
) -> _TextMap:
    """Weighted ridge regression on the states, their random features and a constant."""
    width = inputs.shape[1]
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(settings.hidden, width, generator=generator) / width**0.5
    bias = torch.randn(settings.hidden, generator=generator) * 0.5
    root = torch.linalg.cholesky(noise + 1e-5 * torch.eye(width))
    size = width + settings.hidden + 1
    squares, products = torch.zeros(size, size), torch.zeros(size, targets.shape[1])
    for _ in range(settings.draws):
        noisy = inputs + torch.randn(inputs.shape, generator=generator) @ root.T
        features = torch.cat([noisy, F.gelu(noisy @ hidden.T + bias), torch.ones(len(noisy), 1)], dim=1)
        squares += (features * weights[:, None]).T @ features / settings.draws
        products += (features * weights[:, None]).T @ targets / settings.draws
    penalty = torch.full((size,), settings.ridge)
    penalty[-1] = 1e-4  # of the constant
    solution = torch.linalg.solve(squares + torch.diag(penalty), products).T
    return _TextMap(solution[:, :width], solution[:, width:-1], solution[:, -1], hidden, bias)


def apply(bridge: dict[str, Tensor], side: str, rows: Tensor) -> Tensor:
    """Unit vectors of the shared space; `side` is `image` or `text`."""
    result = F.linear(rows, bridge[f"{side}.linear.weight"].float(), bridge[f"{side}.linear.bias"].float())
    if f"{side}.hidden.weight" in bridge:
        hidden = F.linear(rows, bridge[f"{side}.hidden.weight"].float(), bridge[f"{side}.hidden.bias"].float())
        output, bias = bridge[f"{side}.output.weight"].float(), bridge[f"{side}.output.bias"].float()
        result = result + F.linear(F.gelu(hidden), output, bias)
    return F.normalize(result, dim=-1)


def ridge_bridge(pictures: Pictures, things: Sequence[Thing], texts: Texts) -> dict[str, Tensor]:
    """The plain way, to compare with: ridge regression from photographs to the states of their first names."""
    first = torch.tensor([texts.at[thing.name] for thing in things])
    rows, states = pictures.rows, texts.states.mean(1)[first[pictures.things]]
    centre, middle = rows.mean(0), states.mean(0)
    scale = (rows - centre).square().mean().sqrt()
    scaled = (rows - centre) / scale
    squares = scaled.T @ scaled / len(rows) + 0.3 * torch.eye(rows.shape[1])
    image = torch.linalg.solve(squares, scaled.T @ (states - middle) / len(rows)).T / scale
    return {
        "image.linear.weight": image,
        "image.linear.bias": -image @ centre,
        "text.linear.weight": torch.eye(states.shape[1]),
        "text.linear.bias": -middle,
    }
