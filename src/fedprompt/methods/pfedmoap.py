"""pFedMoAP (Luo et al., ICLR 2025, arXiv 2410.10114): contexts of other clients as experts, weighed together with the
client's own by a local gate.

The server keeps the average context P_g and a pool: the context that every client uploaded last. In a round client i

1. starts from P_i = P_g;
2. gets the K contexts of the pool nearest to *its own* pool entry, itself left out, of the pool as it was before the
   round. Their text features T_e, e = 1..K, are computed once; T_0 are those of P_i;
3. trains P_i and its gate together by cross-entropy on

       logits = scale * pool(I) . M(I, T_0..T_K)  +  lambda * scale * I . T_0

   with M the gate's mixture of experts (see `modules/gates.py`). The weight lambda is on the *local* expert;
4. uploads P_i, which is averaged into P_g and replaces its entry of the pool. The gate stays.

A client without a pool entry has no neighbours: it trains P_i with the local logits only, as in CoOp, and its gate does
not change (not even by weight decay). It predicts with the context it trained last, its gate, and the nearest contexts
of the current pool; a client that never took part predicts with P_g. The paper does not define predictions with an
untrained gate, as after a client's first round: it is random, so here the client predicts with the local logits until
it has trained its gate once. A held-out client has no pool entry either: it tunes P_g with the local logits, as in any
first participation.

We know the linear gate only by name ("linear projection"). Ours maps the pooled image to one weight per expert, and
mixes text features at full width; expert e is the e-th nearest. With `gate_sharing: aggregated` the gate is averaged
with the context.

Where the public code differs from the paper we follow the paper: it never calls its nearest-neighbour selection, which
could return the client itself; experts come from a pool that changes while the clients of a round train; gates and
experts leak from one client to the next; momentum and schedule are shared by all clients; clients that never took part
cannot be evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Mixture, Progress, Seen, Server, Stage, Upload, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import RATES, precise, similarity
from fedprompt.methods.promptfl import PromptFL
from fedprompt.modules import gates
from fedprompt.modules.ann_index import library
from fedprompt.modules.init import linear_layer
from fedprompt.modules.knn import drawn
from fedprompt.random_streams import Stream, stream
from fedprompt.tensors import Tensors, pick, prefixed, stripped

GATE = "gate."
SELECTION_SEED = "selection_seed"


@register("pfedmoap")
@dataclass(frozen=True)
class PFedMoAP(PromptFL):
    """Contexts of the nearest clients as experts, mixed by a gate that never leaves its client."""

    rates: ClassVar[Mapping[str, float | str]] = RATES
    search_space: ClassVar[SearchSpace] = {"method.local_weight": FloatRange(0.0, 1.0, log=False)}

    symbols: ClassVar[Mapping[str, str]] = {"lambda": "local_weight"}

    experts: Annotated[int, Field(ge=1)] = 10
    """K + 1 experts, including the client's own; fewer while the pool is small."""
    local_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """Lambda, weight of the local logits; 0 = mixture only."""
    gate: Literal["attention", "linear"] = "attention"
    """Kind of the gate."""
    gate_width: Annotated[int, Field(ge=1)] = 128
    """w, dimensions after pooling; must divide the dimensions of the features."""
    heads: Annotated[int, Field(ge=1)] = 8
    """h, heads of the attention."""
    scaling: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Factor on q . k, in place of 1/sqrt(w/h)."""
    pooling: gates.Pooling = "stride"
    """Every (D/w)-th number of a feature, or means of D/w numbers."""
    selection: Literal["nearest", "random"] = "nearest"
    """Which contexts of the pool a client gets."""
    search: Literal["exact", "approximate"] = "exact"
    """Search for the nearest contexts; approximate needs `fedprompt[index]`."""
    gate_sharing: Literal["local", "aggregated"] = "local"
    """Keep the gate local, or average it with the context."""
    gate_when_alone: bool = False
    """Use the gate even if the client's own expert is the only one."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if world.text.features % self.gate_width:
            rule = f"divide the {world.text.features} dimensions of the features"
            raise ConfigError(broken("method.gate_width", rule, self.gate_width))
        if self.gate == "attention" and self.gate_width % self.heads:
            raise ConfigError(broken("method.heads", f"divide method.gate_width {self.gate_width}", self.heads))
        if self.search == "approximate":
            library()

    def others(self, world: World) -> int:
        """K, the most experts besides its own that a client can get."""
        return min(self.experts, world.clients - len(world.newcomers)) - 1

    @property
    def sums_suffice(self) -> bool:
        return False  # keeps a pool of contexts

    def init(self, world: World, generator: Stream) -> Roles:
        context = self.new_context(world, generator)
        gate = world.placed(prefixed(GATE, self._new_gate(world, generator)))
        never = torch.zeros((), dtype=world.dtype, device=world.device)
        own = {"last_context": context.clone(), "took_part": never, "gate_trained": never.clone()}
        server = {SELECTION_SEED: torch.tensor(generator.integer(2**62))} if self.selection == "random" else {}
        if self.gate_sharing == "aggregated":
            return Roles(shared={"context": context, **gate}, local=own, server=server)
        return Roles(shared={"context": context}, local={**own, **gate}, server=server)

    def _new_gate(self, world: World, generator: Stream) -> Tensors:
        if self.gate == "linear":
            return linear_layer("linear", 1 + self.others(world), self.gate_width, generator)
        return gates.attention_start(self.gate_width, generator)

    def download(self, world: World, server: Server, client: int) -> Tensors:
        """The shared tensors and the contexts (k, m, d) of the chosen clients; none without a pool entry."""
        chosen = self._chosen(world, server, client) if client in server.pool else []
        context = server.shared["context"]
        experts = server.pool.rows(chosen).to(context) if chosen else context.new_empty(0, *context.shape)
        return {**server.shared, "experts": experts}

    def _chosen(self, world: World, server: Server, client: int) -> list[int]:
        """Random choices depend only on the run's seed, the round and the client."""
        if self.selection == "nearest":
            return server.pool.nearest(client, self.others(world), self.search == "approximate")
        generator = stream(int(server.own[SELECTION_SEED]), server.round, client, "experts")
        others = server.pool.clients
        return drawn(others[others != client], self.others(world), generator)

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = {**received, **local}
        experts = self._ready_experts(world, params.pop("experts"))
        return {**params, **experts}

    def _ready_experts(self, world: World, contexts: Tensor) -> Tensors:
        """Text features of the received contexts, padded so that they have the same shape on all clients."""
        found, most = len(contexts), self.others(world)
        features = contexts.new_zeros(0, world.classes, world.text.features)
        if found:
            with torch.no_grad():
                features = world.text.encode(contexts, self.class_position)
        known = features.new_ones(found)
        return {
            "expert_features": F.pad(features, (0, 0, 0, 0, 0, most - found)),  # (K, C, D)
            "expert_known": F.pad(known, (0, most - found)),  # (K,)
            "gated": features.new_tensor(float(found > 0 or self.gate_when_alone)),
        }

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        trained = local["gate_trained"]
        experts = received["experts"] if trained > 0 else received["experts"][:0]
        params = self.begin(world, client, {**received, "experts": experts}, local)
        context = torch.where(local["took_part"] > 0, local["last_context"], received["context"])
        return {**params, "context": context, "gated": params["gated"] * trained}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, ("context", *self._gate_names(world)), train.epochs),)

    def _gate_names(self, world: World) -> tuple[str, ...]:
        return tuple(name for name in (*world.roles.shared, *world.roles.local) if name.startswith(GATE))

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = similarity(world, seen.image, seen.text["context"])
        text, weights = self.experts_and_weights(params, seen)
        if self.gate == "linear":
            scores = gates.linear_scores(weights, precise(seen.image), text)
        else:
            scores = gates.attention_scores(_gate(params), weights, self._pooled(seen.image), self._pooled(text))
        mixed = world.text.scale * scores + self.local_weight * plain
        return torch.where(params["gated"] > 0, mixed, plain)

    def experts_and_weights(self, params: Tensors, seen: Seen) -> tuple[Tensor, Tensor]:
        """Text features (1 + K, C, D), local ones first, and gate weights (B, C, h, 1 + K), or (B, 1 + K) if linear."""
        text = precise(torch.cat([seen.text["context"].unsqueeze(0), params["expert_features"]]))
        gate, image, known = _gate(params), self._pooled(seen.image), all_known(params)
        if self.gate == "linear":
            return text, gates.linear_weights(gate, image, known)
        return text, gates.attention_weights(gate, image, self._pooled(text), known, self.heads, self.scaling)

    def _pooled(self, features: Tensor) -> Tensor:
        return gates.pooled(precise(features), self.gate_width, self.pooling)

    def after_step(self, world: World, params: Tensors, before: Tensors, step: int) -> Tensors:
        """An unused gate does not change: weight decay would change it without a gradient."""
        used = before["gated"] > 0
        resting = {
            name: torch.where(used, tensor, before[name]) for name, tensor in params.items() if name.startswith(GATE)
        }
        return {**params, **resting}

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        kept = {
            **pick(params, world.roles.local),
            "last_context": params["context"],
            "took_part": torch.ones_like(params["took_part"]),
            "gate_trained": torch.maximum(params["gate_trained"], params["gated"]),
        }
        return pick(params, world.roles.shared), kept

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        contexts = {upload.client: upload.tensors["context"] for upload in uploads}
        return replace(averaged, pool=server.pool.with_rows(contexts))

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        """A first participation: train the received context with the local logits."""
        return (Stage(self, ("context",), epochs, "newcomer.local"),)

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        """Of clients that use a gate: the weight of the local expert, the mean weight of another, and the entropy."""
        if not params["gated"] > 0:
            return {}
        _, weights = self.experts_and_weights(params, seen)
        known = all_known(params)
        local = gates.by_image(weights[..., 0])
        found = {"gate.weight_local": local, "gate.entropy": gates.entropy(weights, known)}
        if known.sum() > 1:
            found["gate.weight_other"] = (1 - local) / (known.sum() - 1)
        return found

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        """The gate's weights, as means over classes and heads; neighbour 1 is the nearest. A client does not learn who
        its neighbours are.
        """
        if not params["gated"] > 0:
            return (Mixture("experts", ("own",), seen.image.new_ones(len(seen.image), 1)),)
        _, weights = self.experts_and_weights(params, seen)
        each = weights.reshape(len(weights), -1, weights.shape[-1]).mean(1)
        kept = int(all_known(params).sum())
        kind = "neighbour" if self.selection == "nearest" else "drawn client"
        others = tuple(f"{kind} {number}" for number in range(1, kept))
        return (Mixture("experts", ("own", *others), each[:, :kept]),)


def _gate(params: Tensors) -> Tensors:
    return {name: precise(tensor) for name, tensor in stripped(GATE, params).items()}


def all_known(params: Tensors) -> Tensor:
    """Mask of the 1 + K experts that exist: always the local one."""
    return F.pad(params["expert_known"], (1, 0), value=1.0)
