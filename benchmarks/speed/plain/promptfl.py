"""PromptFL with `transformers`: one text context in front of the class names, averaged; both towers run in every step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from federated import Params, job
from safetensors.torch import load_file
from torch import Tensor

own = job()
text = transformers.BertModel.from_pretrained(own.folder / "text", add_pooling_layer=False).eval().requires_grad_(False)
maps = load_file(own.folder / "maps.safetensors")
names: list[list[int]] = own.settings["names"]  # the tokens behind the context, the end of the sentence included
longest = max(map(len, names))
tokens = torch.tensor([each + [0] * (longest - len(each)) for each in names])
context = own.shared["context"]
words = text.embeddings.word_embeddings(tokens)
start = text.embeddings.word_embeddings(torch.tensor([own.settings["start_token"]])).expand(len(names), -1, -1)
mask = torch.tensor([[1] * (1 + len(context) + len(each)) + [0] * (longest - len(each)) for each in names])


def mapped(which: str, x: Tensor) -> Tensor:
    y = F.linear(x, maps[f"{which}.linear.weight"], maps.get(f"{which}.linear.bias"))
    if f"{which}.hidden.weight" in maps:
        hidden = F.gelu(F.linear(x, maps[f"{which}.hidden.weight"], maps[f"{which}.hidden.bias"]))
        y = y + F.linear(hidden, maps[f"{which}.output.weight"], maps[f"{which}.output.bias"])
    return F.normalize(y, dim=-1)


@torch.no_grad()
def seen(images: Tensor) -> Tensor:
    rows = own.model(pixel_values=images).last_hidden_state
    return mapped("image", torch.cat([rows[:, 0], rows[:, 1:].mean(1)], dim=-1))


def spoken(params: Params) -> Tensor:
    sentences = torch.cat([start, params["context"].expand(len(names), -1, -1), words], dim=1)
    rows = text(inputs_embeds=sentences, attention_mask=mask).last_hidden_state
    return mapped("text", (rows * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def logits(params: Params, images: Tensor) -> Tensor:
    return own.settings["scale"] * seen(images) @ spoken(params).T


own.run(
    loss=lambda params, images, labels: F.cross_entropy(logits(params, images), labels),
    predict=lambda params, images: logits(params, images).softmax(-1),
)
