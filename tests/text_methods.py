"""What tests of methods on the tiny dual encoder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from support import experiment, run
from torch import Tensor

from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import step_loss
from fedprompt.core.method import Method, Server, World
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.features.image_bank import ImageBank
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors


def on_clip(settings: Any, name: str, **changes: Any) -> dict[str, Any]:
    """The tiny experiment on the tiny dual encoder, with short contexts; `name` keeps runs apart."""
    train = {"epochs": 2, **changes.pop("train", {})}
    backbone = {"name": "tiny-clip", **changes.pop("backbone", {})}
    values: dict[str, Any] = settings(name=name, backbone=backbone, train=train, **changes)
    return values


def run_on_clip(settings: Any, method: Method, name: str, **changes: Any) -> Run:
    return run(on_clip(settings, name, **changes), method)


def runtime_of(settings: Any, method: Method, **changes: Any) -> tuple[ClientRuntime, World]:
    """Clients with their images, none of which has trained yet."""
    made = experiment(on_clip(settings, "runtime", **changes), method)
    source, manifest, backbone, world = made.factory.prepare()
    store = ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache)
    bank = ImageBank(source, manifest, store, backbone)
    states = ClientStates(lambda client: None)
    return ClientRuntime(made.config, world, method, bank, states, source.domain_names), world


def working_parameters(runtime: ClientRuntime, client: int = 0, server: Server | None = None) -> Tensors:
    """What a client begins its first participation with."""
    world, method, who = runtime.world, runtime.method, runtime._client(client, 1)
    start = Server(world.roles.shared, world.roles.server) if server is None else server
    return method.begin(world, who, method.download(world, start, client), runtime._new(who))


def gradient(runtime: ClientRuntime, method: Method, params: Tensors, name: str, client: int = 0) -> Tensor:
    """Of one step's loss on the first training images of a client."""
    leaf = params[name].detach().requires_grad_()
    images = runtime.bank.images(client, "train")
    loss = step_loss(method, runtime.world, {**params, name: leaf}, images, torch.arange(6), {})
    (found,) = torch.autograd.grad(loss, leaf)
    return found


def results(run: Run, round: int) -> Mapping[int, Mapping[str, Any]]:
    """Every client's figures in one round."""
    return run.reader.evaluations(round)


def noise_like(tensor: Tensor, seed: int, scale: float = 0.05) -> Tensor:
    return scale * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
