"""A trained client as a folder or as a repository of the Hugging Face hub, in the words of `huggingface_hub`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from fedprompt.errors import ConfigError, StorageError, broken
from fedprompt.inference.export import export
from fedprompt.inference.exported_client import ExportedClient
from fedprompt.inference.trained_client import TrainedClient

WANTED = ("*.json", "*.safetensors", "README.md")  # what is downloaded: data, no code


def own_tensors(client: TrainedClient) -> list[str]:
    """Names of the tensors that a client predicts with and that are not as the server sent them."""
    received = client.opened.received(client.index, client.world)
    return sorted(
        name
        for name, tensor in client.params.items()
        if name not in received or not torch.equal(tensor.cpu(), received[name].cpu())
    )


def save_pretrained(
    client: TrainedClient,
    folder: str | Path,
    include_local: bool = False,
    with_backbone: bool = True,
    approximate: bool = False,
) -> dict[str, Any]:
    """Export a client, unless the folder would hold something that never left it."""
    own = own_tensors(client)
    if own and not include_local:
        rule = "be true to write tensors that never left the client"
        raise ConfigError(broken("include_local", f"{rule} ({', '.join(own)})", include_local))
    if approximate and not include_local:
        rule = "be true for an approximate export, which has means over the client's images"
        raise ConfigError(broken("include_local", rule, include_local))
    return export(client, Path(folder), with_backbone, approximate)


def push_to_hub(client: TrainedClient, repo_id: str, private: bool, token: str | None, **options: Any) -> str:
    """Upload what `save_pretrained` writes; returns the address of the commit."""
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "client"
        save_pretrained(client, folder, **options)
        api = HfApi(token=token)
        try:
            repo = api.create_repo(repo_id, private=private, exist_ok=True)
            message = f"{client.config.label}, {client.name}, by fedprompt"
            return str(api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message))
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot write to hub repository {repo_id!r}: {error}") from error


def from_pretrained(
    name_or_folder: str | Path, revision: str | None, token: str | None, backbone: str | Path | None
) -> ExportedClient:
    """The client of a folder or, where there is none of this name, of a repository of the hub."""
    folder = Path(name_or_folder)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            found = snapshot_download(str(name_or_folder), revision=revision, token=token, allow_patterns=[*WANTED])
        except (OSError, ValueError) as error:
            rule = "be an exported folder, or a repository of the hub that can be read"
            raise StorageError(f"{broken('client', rule, str(name_or_folder))}: {error}") from error
        folder = Path(found)
    return ExportedClient.open(folder, backbone)
