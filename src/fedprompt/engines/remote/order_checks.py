"""What a node checks of an order before it uses an image, and what it says of an error afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_cache import identity
from fedprompt.client.runtime import ClientRuntime
from fedprompt.engines.remote.protocol import Order, Setting
from fedprompt.engines.remote.site_policy import Refused
from fedprompt.errors import ConfigError, ContractError, DivergenceError, FedpromptError, RunError, StorageError, broken
from fedprompt.privacy import mechanism

REPORTED: dict[type[FedpromptError], str] = {
    ConfigError: "config",
    ContractError: "contract",
    DivergenceError: "finite",
    RunError: "state",
}  # errors whose text contains only settings and tensor names, and the rule they are reported under


class Refusal(Exception):
    """A node refuses an order: the name of the rule, and a sentence without private details."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.rule = rule


def refuse(found: Iterable[Refused]) -> None:
    """Raise the first reason for a refusal, if any."""
    for each in found:
        raise Refusal(each.rule, each.text)


def is_private(runtime: ClientRuntime) -> bool:
    """Whether noise is added to uploads on this side."""
    return runtime.terms is not None and runtime.terms.settings.noise_at != "server"


def is_about_files(error: Exception) -> bool:
    """Whether an error is about disks and memory. After an image was used, any other error may depend on images."""
    return isinstance(error, OSError | MemoryError | StorageError)


def check_rounds(order: Order, last: int) -> None:
    """The noise of a private run covers its own rounds, not more."""
    for requested in (order.evaluate, order.train):
        if requested is not None and not 1 <= requested <= last:
            raise Refusal("round", f"round must be one of the run's 1 to {last}, got {requested}")


def check_received(received: Mapping[str, Tensor], runtime: ClientRuntime) -> None:
    """Shared tensors are as declared before an image is used; else what becomes of them would depend on images."""
    for name, declared in runtime.world.roles.shared.items():
        tensor = received.get(name)
        if tensor is not None and (tensor.shape, tensor.dtype) != (declared.shape, declared.dtype):
            rule = f"be {declared.dtype} of shape {tuple(declared.shape)}"
            raise Refusal("order", broken(f"tensor {name!r}", rule, f"{tensor.dtype} of shape {tuple(tensor.shape)}"))
    bound = received.get(mechanism.CLIP)
    if bound is None:
        return
    settings = None if runtime.terms is None else runtime.terms.settings
    if settings is None or settings.quantile is None or settings.noise_at != "server":
        raise Refusal("privacy", f"order must have {mechanism.CLIP} only with privacy.quantile and noise at the server")
    if bound.numel() != 1 or not float(bound) > 0:
        raise Refusal("privacy", f"{mechanism.CLIP} must be one number above 0")


def check_backbone(backbone: ViT, setting: Setting) -> None:
    found = identity(backbone)
    if found != setting.backbone:
        text = f"weights of the backbone must be the server's ({setting.backbone[:12]}...), got {found[:12]}..."
        raise Refusal("backbone", text)


def reported(error: FedpromptError) -> tuple[str, str]:
    """The part of an error that the server receives: all of it, or only its type if the text may contain images or files."""
    for kind, rule in REPORTED.items():
        if isinstance(error, kind):
            return rule, str(error)
    return "node", f"{type(error).__name__}: see the log of the node"
