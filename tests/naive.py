"""An independent, slow implementation of prompt tuning: `transformers`' own ViT layers, torch modules and torch's SGD.

It shares no forward, optimiser or aggregation code with fedprompt, so agreement means something.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel


def naive_vit(width: int, depth: int, heads: int, mlp: int, patch: int, image: int, seed: int) -> ViTModel:
    """A random ViT with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=mlp,
        patch_size=patch,
        image_size=image,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    model = ViTModel(config, add_pooling_layer=False)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name and name.endswith("weight")), std=0.15)
    return model.eval()


def as_tensor(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@dataclass
class NaiveVPT:
    """Textbook VPT: prompts (depth, K, d) behind CLS, replaced at each prompted block, carried after the last one."""

    vit: ViTModel

    def layers(self) -> list[nn.Module]:
        return list(self.vit.layers if hasattr(self.vit, "layers") else self.vit.encoder.layer)

    def cls(self, images: Tensor, prompt: Tensor) -> Tensor:
        depth, count, _ = prompt.shape
        hidden = self.vit.embeddings(images)
        batch = len(images)
        for number, layer in enumerate(self.layers()):
            if number == 0:
                fresh = prompt[0].unsqueeze(0).repeat(batch, 1, 1)
                hidden = torch.cat([hidden[:, :1], fresh, hidden[:, 1:]], dim=1)
            elif number < depth:
                fresh = prompt[number].unsqueeze(0).repeat(batch, 1, 1)
                hidden = torch.cat([hidden[:, :1], fresh, hidden[:, 1 + count :]], dim=1)
            hidden = as_tensor(layer(hidden))
        return self.vit.layernorm(hidden)[:, 0]


def naive_local_training(
    model: NaiveVPT,
    images: Tensor,
    labels: Tensor,
    prompt: Tensor,
    weight: Tensor,
    bias: Tensor,
    orders: list[Tensor],
    lr: float,
    momentum: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch training of one client: batches in the given order."""
    prompt, weight, bias = (nn.Parameter(t.clone()) for t in (prompt, weight, bias))
    optimiser = torch.optim.SGD([prompt, weight, bias], lr=lr, momentum=momentum, weight_decay=decay)
    for positions in orders:
        logits = model.cls(images[positions], prompt) @ weight.T + bias
        loss = nn.functional.cross_entropy(logits, labels[positions])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return prompt.detach(), weight.detach(), bias.detach()
