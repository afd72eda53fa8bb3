"""Train, check and write the bridges of the embedded dual encoders: `train_bridge.py mini --data <folder of parquet files>`.

Only TinyImageNet's training photographs and emoji are learned from. Settings were chosen on held-out names; the report sets
(PACS, Office-Caltech10, CIFAR-10, Oxford Pets, Caltech101) are looked at once the bridge is made. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import emoji
import fit
import numpy as np
import texts as text_tower
import torch
import torch.nn.functional as F
import wordnet
from pictures import PLANS, Gallery, clip_projection
from safetensors.torch import save
from torch import Tensor

from fedprompt.assets import ASSETS
from fedprompt.io.files import cache_directory, file_sha256, write_atomically

HERE = Path(__file__).parent
BRIDGES = HERE.parents[1] / "src" / "fedprompt" / "backbones" / "bridges"
SEED = 0
FOLDS = 5
PHOTO_PREFIX = "a photo of a"
REPORT_SETS = ("pacs", "office_caltech10", "cifar10", "oxford_pets", "caltech101")
SCALES = (8.0, 10.0, 14.0, 20.0, 28.0, 40.0, 56.0)
PLANTS, PLANTS_KEPT = 17222, 3  # of the very many plants of WordNet, every third
PERMUTATIONS = 20


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    packages: Path = arguments.packages or work
    plan, cache = PLANS[arguments.bridge], cache_directory()
    names = json.loads((HERE / "names.json").read_text(encoding="utf-8"))
    nouns = wordnet.read_nouns(packages)
    entries = emoji.read_emoji(packages, names["emoji_groups"])
    things = _things(names, entries, nouns, arguments.data)
    encoder = text_tower.TextEncoder(cache)
    texts = _texts(things, nouns, encoder, names["prefixes"], work)
    gallery = Gallery(plan, arguments.data, packages, work, cache)
    pictures = _pictures(gallery, entries, len(names["classes"]))
    before = None if plan.with_patches else clip_projection(cache)
    settings = fit.Settings() if before is None else fit.Settings(shrinkage=1.0)

    held_out = _cross_validation(pictures, things, texts, nouns, settings, before)
    print("held-out names", json.dumps(held_out, indent=1))
    everything = torch.ones(len(texts.names), dtype=torch.bool)
    bridge = fit.fit(pictures, things, texts, nouns, everything, lambda name: True, settings, SEED, before)
    bridge = _stored(bridge)
    bridge["scale"] = torch.tensor([_scale(bridge, pictures, things, texts)])
    path = BRIDGES / f"{arguments.bridge}.safetensors"
    write_atomically(path, save(bridge))
    photos = pictures.of(torch.tensor([not thing.drawn for thing in things]))
    ridge = fit.ridge_bridge(photos, things, texts)
    zero_shot = _zero_shot(bridge, ridge, gallery, encoder, texts, arguments.data)
    print("zero-shot", json.dumps(zero_shot, indent=1))
    data = _data(arguments.data, plan.tower, pictures, texts)
    _write_report(arguments.bridge, path, bridge, settings, data, held_out, zero_shot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a bridge and write it with its report.")
    parser.add_argument("bridge", choices=sorted(PLANS))
    parser.add_argument("--data", type=Path, required=True, help="folder with the parquet files and their JSON files")
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps features from run to run")
    parser.add_argument("--packages", type=Path, help="folder with the npm archives (default: the work folder)")
    return parser.parse_args()


def _things(names: dict[str, Any], entries: list[emoji.Emoji], nouns: wordnet.Nouns, data: Path) -> list[fit.Thing]:
    """The 200 classes of TinyImageNet, then the emoji."""
    declared = json.loads((data / "tiny_imagenet.json").read_text(encoding="utf-8"))
    things = []
    for name, identifier in zip(declared["classes"], declared["wnids"], strict=True):
        alternative, coarse = (names["classes"][name][kind] for kind in ("alternative", "coarse"))
        things.append(fit.Thing(name.lower(), _lower(alternative), _lower(coarse), int(identifier[1:]), drawn=False))
    for entry in entries:
        alternative, coarse = _lower(entry.alternative), _lower(entry.coarse)
        things.append(fit.Thing(entry.name, alternative, coarse, nouns.place(entry.name), drawn=True))
    return things


def _lower(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.lower() for name in names)


def _pictures(gallery: Gallery, entries: list[emoji.Emoji], classes: int) -> fit.Pictures:
    photos, drawn = gallery.photos(), gallery.pictograms(entries, SEED)
    looks = torch.cat([torch.full_like(photos.looks, fit.PHOTO), drawn.looks + 1])
    return fit.Pictures(torch.cat([photos.rows, drawn.rows]), torch.cat([photos.labels, drawn.labels + classes]), looks)


def _texts(
    things: Sequence[fit.Thing],
    nouns: wordnet.Nouns,
    encoder: text_tower.TextEncoder,
    prefixes: list[str],
    work: Path,
) -> fit.Texts:
    """All names with their states, computed once."""
    names = list(dict.fromkeys(name for thing in things for name in thing.names))
    tree = [(name, synset) for name, synset in nouns.names() if _wanted(name, synset, nouns, encoder)]
    path = work / f"texts-{hashlib.sha256(repr((names, tree, prefixes)).encode()).hexdigest()[:16]}.npz"
    if not path.is_file():
        contexts = text_tower.training_contexts(encoder, prefixes, SEED)
        states = torch.stack([encoder(names, context) for context in contexts], dim=1)
        tree_names = [name for name, _ in tree]
        tree_states = torch.stack([encoder(tree_names, context) for context in prefixes[:2]], dim=1)
        np.savez(path, states=states.numpy(), tree_states=tree_states.numpy())
    with np.load(path) as kept:
        states, tree_states = torch.from_numpy(kept["states"]), torch.from_numpy(kept["tree_states"])
    return fit.Texts(names, states, tree, tree_states.mean(1))


def _wanted(name: str, synset: int, nouns: wordnet.Nouns, encoder: text_tower.TextEncoder) -> bool:
    """Names that MiniLM has words for: at most one word falls in two pieces. Of plants, some."""
    words = len(name.replace("-", " ").split())
    if encoder.pieces(name) > words + 1:
        return False
    number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    return number % PLANTS_KEPT == 0 or PLANTS not in nouns.ancestors(synset)


def _cross_validation(
    pictures: fit.Pictures,
    things: Sequence[fit.Thing],
    texts: fit.Texts,
    nouns: wordnet.Nouns,
    settings: fit.Settings,
    before: Tensor | None,
) -> dict[str, Any]:
    """Accuracy among the names of a fold that were never trained on, mean over the folds.

    `unknown` leaves these names out of WordNet's too; `in_tree` keeps them there, without pictures, as for most names in use.
    """
    drawn = torch.tensor([thing.drawn for thing in things])
    generator = np.random.default_rng(5)
    photo_order = generator.permutation(int((~drawn).sum()))
    drawn_order = int((~drawn).sum()) + generator.permutation(int(drawn.sum()))
    carried = fit.carriers(things, texts)
    first = torch.tensor([texts.at[thing.name] for thing in things])
    scores: dict[str, list[float]] = {}
    for fold in range(FOLDS):
        held_photo, held_drawn = (torch.tensor(np.sort(order[fold::FOLDS])) for order in (photo_order, drawn_order))
        hidden = _hidden_names(held_photo, held_drawn, things, texts)
        kept = ~hidden[first]
        kept[held_photo] = kept[held_drawn] = False
        allowed = carried[kept].any(0) & ~hidden
        unknown = {texts.names[at] for at in torch.nonzero(hidden)[:, 0].tolist()}
        training = pictures.of(kept)
        for knowledge in ("unknown", "in_tree"):
            in_tree = (lambda name: name not in unknown) if knowledge == "unknown" else (lambda name: True)  # noqa: B023
            bridge = fit.fit(training, things, texts, nouns, allowed, in_tree, settings, SEED, before)
            for group, held in (("photographs, 40 names", held_photo), ("emoji, 233 names", held_drawn)):
                score = _choice(bridge, pictures, held, texts.states[first[held], 1])
                scores.setdefault(f"{group}, {knowledge}", []).append(score)
        photos = training.of(~drawn)
        score = _choice(
            fit.ridge_bridge(photos, things, texts), pictures, held_photo, texts.states[first[held_photo], 1]
        )
        scores.setdefault("photographs, 40 names, ridge baseline", []).append(score)
    return {
        name: {"mean": _percent(np.mean(values)), "folds": [_percent(v) for v in values]}
        for name, values in scores.items()
    }


def _hidden_names(held_photo: Tensor, held_drawn: Tensor, things: Sequence[fit.Thing], texts: fit.Texts) -> Tensor:
    """(V,): first and alternative names of held-out things, and names nearly the same as a held-out class of photographs."""
    hidden = texts.close[[texts.at[things[at].name] for at in held_photo.tolist()]].any(0)
    for at in [*held_photo.tolist(), *held_drawn.tolist()]:
        hidden[[texts.at[name] for name in (things[at].name, *things[at].alternative)]] = True
    return hidden


def _choice(bridge: dict[str, Tensor], pictures: fit.Pictures, held: Tensor, states: Tensor) -> float:
    """The share of pictures of the held things for which the right one of their names is chosen."""
    chosen = torch.isin(pictures.things, held)
    similar = fit.apply(bridge, "image", pictures.rows[chosen]) @ fit.apply(bridge, "text", states).T
    return _share(held[similar.argmax(1)] == pictures.things[chosen])


def _stored(bridge: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in half precision, to stay below 2 MB."""
    return {
        name: (tensor.half() if tensor.ndim == 2 else tensor.float()).contiguous() for name, tensor in bridge.items()
    }


def _scale(bridge: dict[str, Tensor], pictures: fit.Pictures, things: Sequence[fit.Thing], texts: fit.Texts) -> float:
    """The logit scale with the least cross-entropy on every seventh training photograph, among the 200 class names."""
    classes = [thing for thing in things if not thing.drawn]
    rows, labels = pictures.rows[pictures.looks == fit.PHOTO][::7], pictures.things[pictures.looks == fit.PHOTO][::7]
    states = texts.states[[texts.at[thing.name] for thing in classes], 1]
    similar = fit.apply(bridge, "image", rows) @ fit.apply(bridge, "text", states).T
    return min(SCALES, key=lambda scale: float(F.cross_entropy(scale * similar, labels)))


def _zero_shot(
    bridge: dict[str, Tensor],
    ridge: dict[str, Tensor],
    gallery: Gallery,
    encoder: text_tower.TextEncoder,
    texts: fit.Texts,
    data: Path,
) -> dict[str, Any]:
    """Accuracy in percent on the test images of the report sets."""
    result: dict[str, dict[str, Any]] = {}
    for name in REPORT_SETS:
        declared = json.loads((data / f"{name}.json").read_text(encoding="utf-8"))
        classes = [label.replace("_", " ") for label in declared["classes"]]
        shown = gallery.report(name)
        images = fit.apply(bridge, "image", shown.rows)
        photo = encoder(classes, PHOTO_PREFIX)
        soft = {
            length: [_accuracy(bridge, images, encoder(classes, context), shown.labels) for context in contexts]
            for length in text_tower.SOFT_LENGTHS
            if (contexts := text_tower.soft_contexts(length, 3, seed=77))
        }
        generator = np.random.default_rng(SEED)
        permuted = [
            _accuracy(bridge, images, photo[generator.permutation(len(classes))], shown.labels)
            for _ in range(PERMUTATIONS)
        ]
        ridge_images = fit.apply(ridge, "image", shown.rows)
        tree = {tree_name for tree_name, _ in texts.tree_names}
        result[name] = {
            "images": len(shown.labels),
            "classes": len(classes),
            "chance": _percent(1 / len(classes)),
            "photo": _percent(_accuracy(bridge, images, photo, shown.labels)),
            "name alone": _percent(_accuracy(bridge, images, encoder(classes, ""), shown.labels)),
            **{f"{length} soft tokens": _percent(np.mean(scores)) for length, scores in soft.items()},
            "permuted names": _percent(np.mean(permuted)),
            "ridge baseline": _percent(_accuracy(ridge, ridge_images, photo, shown.labels)),
            "names that had training pictures": sum(label.lower() in texts.at for label in classes),
            "further names known from WordNet": sum(
                label.lower() in tree and label.lower() not in texts.at for label in classes
            ),
        }
        if len(declared["domains"]) > 1:
            similar = images @ fit.apply(bridge, "text", photo).T
            right = similar.argmax(1) == shown.labels
            result[name]["by domain"] = {
                domain: _percent(_share(right[shown.looks == at])) for at, domain in enumerate(declared["domains"])
            }
    return result


def _accuracy(bridge: dict[str, Tensor], images: Tensor, states: Tensor, labels: Tensor) -> float:
    return _share((images @ fit.apply(bridge, "text", states).T).argmax(1) == labels)


def _share(right: Tensor) -> float:
    return float(right.float().mean())


def _percent(share: Any) -> float:
    return round(100 * float(share), 1)


def _data(folder: Path, tower: str, pictures: fit.Pictures, texts: fit.Texts) -> dict[str, Any]:
    photos = int((pictures.looks == fit.PHOTO).sum())
    assets = (tower, "minilm-weights", "minilm-tokenizer")
    archives = {package.file: package.sha256 for package in emoji.PACKAGES}
    archives[f"{wordnet.PACKAGE}-{wordnet.VERSION}.tgz"] = wordnet.SHA256
    return {
        "training photographs": photos,
        "training emoji pictures": len(pictures.looks) - photos,
        "names with pictures": len(texts.names),
        "names of WordNet without pictures": len(texts.tree_names),
        "sha256": {
            **{f"{name}.parquet": file_sha256(folder / f"{name}.parquet") for name in ("tiny_imagenet", *REPORT_SETS)},
            **{name: ASSETS[name].sha256 for name in assets},
            **archives,
            "names.json": file_sha256(HERE / "names.json"),
        },
    }


def _write_report(
    name: str,
    path: Path,
    bridge: dict[str, Tensor],
    settings: fit.Settings,
    data: dict[str, Any],
    held_out: dict[str, Any],
    zero_shot: dict[str, Any],
) -> None:
    """The part of one bridge in report.json; those of others stay."""
    report_path = HERE / "report.json"
    report = json.loads(report_path.read_text(encoding="utf-8")) if report_path.is_file() else {}
    plan = PLANS[name]
    report[name] = {
        "bridge": {
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
            "scale": float(bridge["scale"]),
            "shapes": {key: list(tensor.shape) for key, tensor in sorted(bridge.items())},
        },
        "image tower": plan.tower,
        "image size": plan.image_size,
        "seed": SEED,
        "settings": dataclasses.asdict(settings),
        "data": data,
        "accuracy on held-out names, percent": held_out,
        "zero-shot accuracy on the report sets, percent": zero_shot,
    }
    report_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size} bytes, sha256 {report[name]['bridge']['sha256']}")


if __name__ == "__main__":
    main()
