"""FedAPT (Su et al., AAAI 2024, arXiv 2211.07864): one text context for many domains, scaled by a key of the image's domain.

Every client is a domain k and has a key K_k (m, d), uniform in [0, 1) and never trained. P is the shared context, Q (n, D) a
shared query for the n domains, f(x) the image before it is normalised:

    training of client k   T_c    = g([P * (1 + K_k), c])
                           loss   = CE(scale * I T^T, y) + CE(Q f(x), k)
    prediction             w(x)   = softmax(standardised(Q f(x)) / tau),   mean 0 and deviation 1 over the domains
                           T_c(x) = g([P * (1 + sum_k w_k(x) K_k), c])

P and Q are averaged, every client with the same weight. So a client needs no name of a domain to predict: the query finds
which keys an image is like. A client held out of training has no key; it predicts with those of the others.

With `key_size: 0` the contexts are those of PromptFL with equal weights, since Q does not touch them. With one domain
there is nothing to choose and w is 1.

As in the authors' code (its supervised part). It has one context per class, `class_specific: true` here, and begins at
random. Every image has its own classes in a prediction, so that the text tower reads B * C sentences then; training
reads C. The keys go down with every message: n m d numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Client, Mixture, Prompts, Seen, Server, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.bases.with_text import WithText, precise, similarity
from fedprompt.methods.fedcocoop import similarity_by_image
from fedprompt.modules.contexts import TextContext
from fedprompt.modules.init import uniform
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

KEYS = "keys"  # at the server
SENT = "domain_keys"  # and on the way to a client
OWN = "own_domain"  # (n,), 1 for the domain of this client


@register("fedapt")
@dataclass(frozen=True)
class FedAPT(WithText):
    """A shared context that keys of domains scale, image by image."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """Tau, temperature of the weights of the keys; small: one key for an image."""
    key_size: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Largest number in a key; 0 for contexts that know no domain."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image_raw",)

    @property
    def weighs_evenly(self) -> bool:
        return True

    def init(self, world: World, generator: Stream) -> Roles:
        context = self.new_context(world, generator)
        domains, width = len(world.participants), world.text.features
        query = uniform((domains, width), width, generator)
        keys = self.key_size * generator.uniform(domains, *context.shape[-2:])
        return Roles(shared={"context": context, **world.placed({"query": query})}, server=world.placed({KEYS: keys}))

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return {**server.shared, SENT: server.own[KEYS]}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        own = [float(each == client.index) for each in world.participants]
        return {**received, **local, OWN: received["query"].new_tensor(own)}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        context, keys = params["context"], params[SENT]
        if batch.training:
            key = torch.einsum("n,nmd->md", params[OWN].to(keys), keys)
            return Prompts(text={"context": self.as_context(context * (1 + key))})
        weights = self.weights(params, batch.features["image_raw"]).to(keys)
        key = torch.einsum("bn,nmd->bmd", weights, keys)
        key = key if context.dim() == 2 else key.unsqueeze(1)  # the same for all classes
        return Prompts(text={"context": TextContext(context * (1 + key), self.class_position, per_image=True)})

    def weights(self, params: Tensors, image: Tensor) -> Tensor:
        """w (B, n) of images (B, D)."""
        return standardised(precise(image) @ precise(params["query"]).T).div(self.temperature).softmax(-1)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        text = seen.text["context"]
        if text.dim() == 2:
            return similarity(world, seen.image, text)
        return similarity_by_image(world, seen.image, text)

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        if not batch.training:
            return plain
        found = (precise(batch.features["image_raw"]) @ precise(params["query"]).T).log_softmax(-1)
        return plain - batch.mean(found @ precise(params[OWN]))

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        names = tuple(f"domain {world.client_names[client]}" for client in world.participants)
        return (Mixture("keys of domains", names, self.weights(params, batch.features["image_raw"])),)


def standardised(scores: Tensor) -> Tensor:
    """Scores (B, n) with mean 0 and deviation 1 over the n domains; zeros where all are equal."""
    centred = scores - scores.mean(-1, keepdim=True)
    size = (centred.square().sum(-1, keepdim=True) / max(1, scores.shape[-1] - 1)).sqrt()
    return centred / size.clamp_min(torch.finfo(scores.dtype).tiny)
