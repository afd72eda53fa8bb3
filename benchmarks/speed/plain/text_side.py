"""Text towers with `transformers`: class names behind a context of learnable words.

`TextSide` is the one of the embedded dual encoder, `ClipSide` that of a CLIP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from federated import Job
from safetensors.torch import load_file
from torch import Tensor


def text_side(own: Job) -> TextSide | ClipSide:
    """The text side of the model of a job."""
    return ClipSide(own) if own.model.config.model_type == "clip" else TextSide(own)


class ClipSide:
    """A sentence is [start] context name . [end], filled up to all positions of CLIP; the row of its end is read."""

    def __init__(self, own: Job) -> None:
        self.clip = own.model
        names: list[list[int]] = own.settings[
            "names"
        ]  # the tokens behind the context, the end of the sentence included
        embed, self.positions = self.clip.text_model.embeddings.token_embedding, own.settings["positions"]
        longest = self.positions - 1
        tokens = torch.tensor([each + [0] * (longest - len(each)) for each in names])
        self.words, self.lengths = embed(tokens), torch.tensor([len(each) for each in names])
        self.start = embed(torch.tensor([own.settings["start_token"]])).expand(len(names), -1, -1)

    @torch.no_grad()
    def seen(self, images: Tensor) -> Tensor:
        """Images (B, D) without prompts."""
        rows = self.clip.vision_model(pixel_values=images).pooler_output
        return F.normalize(self.clip.visual_projection(rows), dim=-1)

    def spoken(self, context: Tensor) -> Tensor:
        """Class names (C, D) behind a context (m, d)."""
        text, classes = self.clip.text_model, len(self.words)
        sentences = torch.cat([self.start, context.expand(classes, -1, -1), self.words], dim=1)[:, : self.positions]
        x = sentences + text.embeddings.position_embedding.weight[: self.positions]
        rows = text.final_layer_norm(text.encoder(inputs_embeds=x, is_causal=True).last_hidden_state)
        ends = rows[torch.arange(classes), len(context) + self.lengths]
        return F.normalize(self.clip.text_projection(ends), dim=-1)


class TextSide:
    """A sentence is [start] context name . [end]; the mean of its rows is mapped into the space that images share."""

    def __init__(self, own: Job) -> None:
        text = transformers.BertModel.from_pretrained(own.folder / "text", add_pooling_layer=False)
        self.text, self.job = text.eval().requires_grad_(False), own
        self.maps = load_file(own.folder / "maps.safetensors")
        names: list[list[int]] = own.settings[
            "names"
        ]  # the tokens behind the context, the end of the sentence included
        longest = max(map(len, names))
        tokens = torch.tensor([each + [0] * (longest - len(each)) for each in names])
        embeddings = text.embeddings.word_embeddings
        self.words = embeddings(tokens)
        self.start = embeddings(torch.tensor([own.settings["start_token"]])).expand(len(names), -1, -1)
        self.behind = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in names])

    def mapped(self, which: str, x: Tensor) -> Tensor:
        """Rows in the common space, of length one."""
        maps = self.maps
        y = F.linear(x, maps[f"{which}.linear.weight"], maps.get(f"{which}.linear.bias"))
        if f"{which}.hidden.weight" in maps:
            hidden = F.gelu(F.linear(x, maps[f"{which}.hidden.weight"], maps[f"{which}.hidden.bias"]))
            y = y + F.linear(hidden, maps[f"{which}.output.weight"], maps[f"{which}.output.bias"])
        return F.normalize(y, dim=-1)

    def image(self, rows: Tensor) -> Tensor:
        """Images (B, D) of the rows of CLS and patches."""
        return self.mapped("image", torch.cat([rows[:, 0], rows[:, 1:].mean(1)], dim=-1))

    @torch.no_grad()
    def seen(self, images: Tensor) -> Tensor:
        """Images (B, D) without prompts."""
        return self.image(self.job.model(pixel_values=images).last_hidden_state)

    def spoken(self, context: Tensor) -> Tensor:
        """Class names (C, D) behind a context (m, d)."""
        classes = len(self.words)
        mask = torch.cat([self.behind.new_ones(classes, 1 + len(context)), self.behind], dim=1)
        sentences = torch.cat([self.start, context.expand(classes, -1, -1), self.words], dim=1)
        rows = self.text(inputs_embeds=sentences, attention_mask=mask).last_hidden_state
        return self.mapped("text", (rows * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
