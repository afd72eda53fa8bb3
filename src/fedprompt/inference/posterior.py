"""The posterior of pFedBayesPT over test images: where instance prompts lie, how much masks move them, which blocks use them.

With m_bk the mean that the encoder gives for image b under mask k (one token of one block, d channels), and bars for means

    spread over masks    sqrt( mean_bk |m_bk - m_b.|^2 / d ) / r
    spread over images   sqrt( mean_b  |m_b. - m_..|^2 / d ) / r        r = sqrt( mean_bk |m_bk|^2 / d )
    sigma                sqrt( mean_bk  sigma_bk^2 )         / r

so all three are shares of the length of a token. Tokens whose spread over images is small are another global prompt. The
attention of a block is the share of the attention of CLS that goes to its instance tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.vit import READS
from fedprompt.client.step import inserted, make_batch
from fedprompt.errors import ConfigError, broken
from fedprompt.features.image_bank import Images
from fedprompt.inference.attention_maps import Attention, Watch
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.inference.uncertainty import with_draws
from fedprompt.methods.pfedbayespt import LOGVAR, PFedBayesPTD
from fedprompt.tensors import stripped

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Posterior:
    """Of n test images and the L blocks that have instance prompts."""

    blocks: tuple[int, ...]
    """Their numbers in the whole backbone."""
    means: Array
    """(K, n, L, v d): under K masks; K is 1 for a method without masks."""
    std: Array | None
    """(n, L): root mean square of sigma; None for a method without noise."""
    attention: Array
    """(n, L)."""
    labels: Array
    domains: Array
    clients: Array
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    client_names: tuple[str, ...]

    @property
    def spreads(self) -> dict[str, Array]:
        """`masks`, `images` and `sigma` by block, (L,) each, as shares of the length of a token."""
        centre = self.means.mean(0)
        length = np.sqrt(np.square(self.means).mean((0, 1, 3)))
        found = {
            "masks": np.sqrt(np.square(self.means - centre).mean((0, 1, 3))) / length,
            "images": np.sqrt(np.square(centre - centre.mean(0)).mean((0, 2))) / length,
        }
        if self.std is not None:
            found["sigma"] = np.sqrt(np.square(self.std).mean(0)) / length
        return found

    def components(self, block: int) -> tuple[Array, Array]:
        """The first two principal components (n, 2) of the instance prompts of one block, and their shares of the variance."""
        rows = self.means.mean(0)[:, self.blocks.index(block)]
        left, lengths, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
        variance = np.square(lengths)
        return left[:, :2] * lengths[:2], variance[:2] / variance.sum()

    def to_json(self) -> dict[str, Any]:
        spreads = {name: values.tolist() for name, values in self.spreads.items()}
        return {"images": len(self.labels), "blocks": list(self.blocks), "spread": spreads} | {
            "attention": self.attention.mean(0).tolist()
        }


def posterior(opened: LoadedRun, most: int = 400, draws: int = 10) -> Posterior:
    """Of at most `most` test images, evenly from all clients, under `draws` masks."""
    method = with_draws(opened.method, draws)
    if not isinstance(method, PFedBayesPTD):
        names = "pfedbayespt, pfedbayespt_g or pfedbayespt_d, without a variant"
        raise ConfigError(broken("method.name", f"be {names}, to have instance prompts", opened.config.label))
    if not opened.backbone.shape.has_cls:
        raise ConfigError(
            broken("backbone.name", "have a CLS token, whose attention is shown", opened.config.backbone.name)
        )
    for name, value in (("--images", most), ("--draws", draws)):
        if value < 1:
            raise ConfigError(broken(name, "be at least 1", value))
    opened.factory.method = method
    bank, parts = opened.bank(), []
    clients = range(len(opened.world.client_names))
    every = max(1, -(-sum(len(bank.images(number, "test")) for number in clients) // most))
    for number in clients:
        whole = bank.images(number, "test")
        chosen = np.arange(0, len(whole), every)
        images = Images.of(whole.tables, whole.indices[chosen])
        parts.append((number, images, *_of_client(TrainedClient.open(opened, number), method, images)))
    stds = [part[3] for part in parts]
    source = parts[0][1].tables.source
    depth = parts[0][2].shape[2]
    return Posterior(
        blocks=tuple(range(opened.backbone.stem, opened.backbone.stem + depth)),
        means=np.concatenate([part[2] for part in parts], 1),
        std=None if stds[0] is None else np.concatenate([each for each in stds if each is not None]),
        attention=np.concatenate([part[4] for part in parts]),
        labels=np.concatenate([part[1].labels.cpu().numpy() for part in parts]),
        domains=np.concatenate([part[1].domains for part in parts]),
        clients=np.concatenate([np.full(len(part[1]), part[0]) for part in parts]),
        class_names=tuple(opened.world.class_names),
        domain_names=tuple(source.domain_names),
        client_names=tuple(opened.world.client_names),
    )


def _of_client(client: TrainedClient, method: PFedBayesPTD, images: Images) -> tuple[Array, Array | None, Array]:
    """Means (K, n, L, v d), sigma (n, L) and attention (n, L) of one client's images."""
    means, stds, looks, generator = [], [], [], client.stream()
    with torch.no_grad():
        for start in range(0, len(images), client.batch_size):
            positions = torch.arange(start, min(start + client.batch_size, len(images)))
            batch = make_batch(method, images, positions, training=False)
            noise = client.noise(len(positions), generator)
            networks = (stripped(LOGVAR, client.params),) if f"{LOGVAR}out.weight" in client.params else ()
            mean, *logvar = method.encode(client.world, client.params, batch, noise, networks)
            means.append(mean.flatten(-2).cpu().numpy())
            stds += [each.exp().mean((0, 3, 4)).sqrt().cpu().numpy() for each in logvar]
            looks.append(_attention(client, method, images, positions).cpu().numpy())
    return np.concatenate(means, 1), np.concatenate(stds) if stds else None, np.concatenate(looks)


def _attention(client: TrainedClient, method: PFedBayesPTD, images: Images, positions: Tensor) -> Tensor:
    """(B, L), with one draw."""
    single = with_draws(method, 1)
    batch = make_batch(single, images, positions, training=False)
    drawn = single.noise(client.world, len(positions), False, client.stream())
    noise = {name: tensor.to(client.world.device) for name, tensor in drawn.items()}
    given = inserted(single.prompts(client.world, client.params, batch, noise).tokens)
    eye = Watch(images.backbone.shape.tokens)
    replace(images.backbone, block=eye).run(images.tokens(positions), given, READS)
    attention = Attention(tuple(eye.looked), images.backbone.shape)
    blocks = given[-1].blocks  # the instance prompt is the last slot, so its rows are the last columns
    return torch.stack([attention.at(block)[:, -method.instance_tokens :].sum(-1) for block in blocks], -1)
