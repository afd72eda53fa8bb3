"""Whole jobs: `fedprompt run` against a plain program with `transformers`, from the start of the process to the last figure.

Both sides get the same images, split, weights, start, batch size, rates, rounds and evaluations, one thread, float32.
Images are decoded once by both. Ours runs twice: with an empty cache of pixels and features, and again with what the
first run left (cold and warm); frozen weights are at hand for both sides. The mean accuracies over clients at the end
must be near each other, or the row says that the sides learned something else. One job also runs in Flower's simulation.

The FLOPs of a job are those of the matrix products that our warm run really makes: what must be done once every exact
shortcut is taken. They are counted in a run of one round, and every round does the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from peers import (
    MARK,
    ONE_THREAD,
    QUIET,
    Unavailable,
    end_marked,
    environment,
    last_line,
    parsed,
    peak_megabytes,
    printed,
)

HERE = Path(__file__).resolve().parent
SECONDS = 1200  # the longest a side may take
POINTS_APART = 0.15  # of mean accuracy over few test images, that two sides may be at the end
LOSSES_APART = 0.05  # and of the mean training loss of the last round, as a share, where both are told
PEAK_SIDE, PEAK_REPEATS = 3072, 5  # of the product that tells the peak
VISION, TEXT, CLIP = (
    ("pacs.parquet", "dinov2-small"),
    ("caltech101.parquet", "mini"),
    ("caltech101.parquet", "a CLIP of random weights"),
)
CLIP_TEXT = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "max_position_embeddings": 77,
}  # CLIP's text tower with half of its blocks
CLIP_VISION = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "patch_size": 16,
    "image_size": 224,
}  # half of ViT-B/16 in every direction
ASSETS = ("weights", "backbones", "data", "members")  # of the cache; pixels and features are what a cold run lacks


@dataclass(frozen=True)
class Work:
    """A job and what it should reach."""

    letter: str
    what: str
    method: dict[str, Any]
    plain: str = ""
    """The program beside ours; nothing where none is written."""
    target: float | None = None
    peak: float | None = None
    """Per cent of the GEMM peak."""
    kind: tuple[str, str] = VISION
    rounds: int = 3
    clients: int = 4
    flower: str = ""
    """The same program in Flower's simulation."""
    extra: dict[str, Any] = field(default_factory=dict)


VISION_JOBS = (
    Work("f", "FedVPT-D, 4 clients", {"name": "fedvpt_deep"}, "fedvpt_deep", 1.4, 75, flower="fedvpt_deep_flower"),
    Work("g", "pFedBayesPT, V = 5", {"name": "pfedbayespt", "predict_draws": 5}, "pfedbayespt", 2, 75, rounds=2),
    Work("h", "PEP-FedPT", {"name": "pep_fedpt"}, "pep_fedpt", 1.6, 75),
)
TEXT_JOBS = (
    Work("i", "PromptFL", {"name": "promptfl"}, "promptfl", None, None, TEXT, 2, 10),
    Work("j", "pFedMoAP", {"name": "pfedmoap"}, "pfedmoap", None, None, TEXT, 2, 10),
    Work("k", "pFedDC with vision prompts", {"name": "pfeddc"}, "pfeddc", 1.5, 75, (VISION[0], "mini"), 2, 4),
)
CLIP_JOBS = (
    Work("m", "PromptFL, CLIP", {"name": "promptfl"}, "promptfl", 20, None, CLIP, 2, 10),
    Work("n", "pFedMoAP, CLIP", {"name": "pfedmoap"}, "pfedmoap", 20, None, CLIP, 2, 10),
)
HEAD_TUNE = Work("l", "Head-Tune", {"name": "head_tune"}, "head_tune", 20, rounds=8)
JOBS = (*VISION_JOBS, *TEXT_JOBS, HEAD_TUNE, *CLIP_JOBS)


@dataclass(frozen=True)
class Spent:
    """What a side needed, and what it learned."""

    wall: float
    cpu: float
    megabytes: float
    average: float
    loss: float | None = None
    """Mean over the training images of the last round."""


def config(work: Work, data: Path | None, folder: Path) -> dict[str, Any]:
    """The settings of our side."""
    file, backbone = work.kind
    real = data is not None
    images: dict[str, Any] = {"source": str(data / file)} if data is not None else {"source": "embedded"}
    many = file == TEXT[0] and real
    images |= {"train_per_cell": 2 if many else 4, "test_per_cell": 1 if many else 2}
    frozen: dict[str, Any] = {"name": backbone, "image_size": 98}
    if work.kind is CLIP:
        images["train_per_cell"] = 1 if many else 4
        frozen = {"name": str(folder / "clip"), "image_size": 224, "mean": [0.5] * 3, "std": [0.5] * 3}
    return {
        "name": f"job-{work.letter}",
        "data": images,
        "partition": {"scheme": "dirichlet", "alpha": 5.0, "clients": work.clients, "min_train": 4, "min_test": 2},
        "backbone": frozen,
        "method": work.method,
        "train": {"batch_size": 16},
        "federation": {"rounds": work.rounds, "evaluation_batch": 32},
        "output": {"directory": str(folder / "runs"), "cache": str(folder / "cache"), "threads": 1},
        **work.extra,
    }


def prepare(folder: Path, settings: dict[str, Any]) -> None:
    """Everything the plain program reads: images as files, the frozen model, the start, and the numbers of the job."""
    from safetensors.torch import save_file

    from fedprompt.backbones.dual_encoder import DualEncoder
    from fedprompt.core.recipe import learning_rate
    from fedprompt.experiment import Experiment
    from fedprompt.inference.transformers_model import as_transformers

    made = Experiment(settings)
    source, manifest, backbone, world = made.factory.prepare()
    (folder / "images").mkdir()

    def filed(indices: Sequence[int]) -> list[tuple[str, int]]:
        found = []
        for index in map(int, indices):
            name = f"images/{index}.png"
            if not (folder / name).exists():
                source.image(index).convert("RGB").save(folder / name)
            found.append((name, int(source.labels[index])))
        return found

    parts = manifest.clients.parts
    train, start = made.config.train, {**world.roles.shared, **world.roles.local}
    if train.optimizer != "adam" or {train.schedule} != {"cosine"} or train.clip_norm is not None:
        raise Unavailable("the plain programs know Adam with a cosine over rounds only")
    job: dict[str, Any] = {
        "pixels": backbone.shape.image_size,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        "classes": world.classes,
        "rounds": made.config.federation.rounds,
        "epochs": train.epochs,
        "batch_size": train.batch_size,
        "evaluation_batch": made.config.federation.evaluation_batch,
        "rates": {name: learning_rate(train, name, start) for name in start},
        "shared": sorted(world.roles.shared),
        "local": sorted(world.roles.local),
        "trained": sorted({name for stage in made.method.stages(world, train) for name in stage.trainable}),
        "clients": [
            {part: filed(parts[part][client]) for part in ("train", "test")} for client in range(world.clients)
        ],
    }
    job["method"] = of_method(str(made.config.method["name"]), made.method, world)
    save_file({name: tensor.contiguous().clone() for name, tensor in start.items()}, folder / "start.safetensors")
    if (folder / "clip").exists():
        (folder / "model").symlink_to(folder / "clip")
        job |= {**words_of(backbone, world.class_names), "positions": backbone.text.shape.positions}
    else:
        as_transformers(backbone).save_pretrained(folder / "model")
        if isinstance(backbone, DualEncoder):
            job |= prepare_text(folder, backbone, world.class_names)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")


def of_method(name: str, method: Any, world: Any) -> dict[str, Any]:
    """The numbers that a plain program needs of a method's settings."""
    names = {
        "pfedbayespt": {
            "keep": "keep_probability",
            "prior": "prior_scale",
            "kl_weight": "kl_weight",
            "draws": "predict_draws",
        },
        "pfedmoap": {"width": "gate_width", "heads": "heads", "scaling": "scaling", "local_weight": "local_weight"},
        "pfeddc": {"heads": "heads"},
    }.get(name, {})
    found = {short: getattr(method, setting) for short, setting in names.items()}
    if name == "pfedmoap":
        found["others"] = method.others(world)
    if name == "pep_fedpt":
        found["class_blocks"] = list(method.blocks_of_classes(world))
    return found


def prepare_text(folder: Path, backbone: Any, class_names: Sequence[str]) -> dict[str, Any]:
    """The text tower as a `transformers` model, both maps into the common space, and the tokens behind the context."""
    import transformers
    from safetensors.torch import load_file, save_file

    from fedprompt.assets import prepare as asset
    from fedprompt.io.files import cache_directory

    text = backbone.text
    sizes = {
        "hidden_size": text.shape.width,
        "num_hidden_layers": text.shape.depth,
        "vocab_size": text.shape.vocabulary,
    }
    sizes |= {"num_attention_heads": text.shape.heads, "intermediate_size": text.shape.mlp_width}
    bert = transformers.BertModel(
        transformers.BertConfig(**sizes, layer_norm_eps=text.shape.norm_eps), add_pooling_layer=False
    )
    weights = load_file(asset("minilm-weights", cache_directory()))
    kept = {
        name: tensor for name, tensor in weights.items() if not name.startswith(("pooler.", "embeddings.position_ids"))
    }
    bert.load_state_dict(kept, strict=False)
    bert.save_pretrained(folder / "text")
    maps = {f"image.{name}": tensor for name, tensor in backbone.image_projection.weights.items()}
    maps |= {f"text.{name}": tensor for name, tensor in text.projection.weights.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in maps.items()}, folder / "maps.safetensors")
    return words_of(backbone, class_names)


def words_of(backbone: Any, class_names: Sequence[str]) -> dict[str, Any]:
    """The tokens behind the context, and those that frame a sentence."""
    text = backbone.text
    names = text.names(class_names)
    ends = [[*ids, *stop, text.end] for ids, stop in zip(names.ids, names.stops, strict=True)]
    return {"names": ends, "start_token": text.start, "scale": backbone.scale}


def write_clip(folder: Path, class_names: Sequence[str]) -> None:
    """A CLIP of random weights, which cost the same as trained ones, with a tokenizer that knows the words of the class names.

    CLIP's own needs a network, and splits these names into about as many tokens.
    """
    import torch
    import transformers

    from fedprompt.backbones.clip import END, START

    letters = sorted(
        {letter for name in class_names for letter in name if not letter.isspace()} | set("abcdefghijklmnopqrstuvwxyz.")
    )
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    merges: dict[tuple[str, str], None] = {}
    for word in sorted({word for name in class_names for word in name.lower().split()}):
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            merges[parts[0], parts[1]] = None
            parts[:2] = ["".join(parts[:2])]
    tokens += dict.fromkeys("".join(pair) for pair in merges)
    tokens += [START, END]
    words = transformers.CLIPTokenizer(vocab={token: place for place, token in enumerate(tokens)}, merges=list(merges))
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1, "pad_token_id": len(tokens) - 1}
    torch.manual_seed(0)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**CLIP_TEXT, **ends, "vocab_size": len(tokens)}, vision_config=CLIP_VISION, projection_dim=512
        )
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def spent(command: Sequence[str], folder: Path, extra: Mapping[str, str] | None = None) -> tuple[Spent, str]:
    """Run a side; its accuracy is filled in by the caller. The second part is what it printed."""
    out, err, mark = folder / "out.txt", folder / "err.txt", uuid.uuid4().hex
    with out.open("wb") as printed_to, err.open("wb") as told:
        began = time.perf_counter()
        known = {**os.environ, **ONE_THREAD, **(extra or {}), MARK: mark}
        process = subprocess.Popen(command, stdout=printed_to, stderr=told, env=known)
        last, megabytes = began + SECONDS, 0.0
        try:
            while True:
                megabytes = max(megabytes, peak_megabytes(process.pid))
                done, status, used = os.wait4(process.pid, os.WNOHANG)
                if done:
                    break
                if time.perf_counter() > last:
                    process.kill()
                    os.wait4(process.pid, 0)
                    process.returncode = -9
                    raise Unavailable(f"took more than {SECONDS} s")
                time.sleep(0.01)
            wall = time.perf_counter() - began
        finally:
            end_marked(mark)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Unavailable(last_line(err.read_text(errors="replace")))
    return Spent(wall, used.ru_utime + used.ru_stime, megabytes, 0.0), out.read_text(errors="replace")


def estimated(folder: Path, settings: dict[str, Any]) -> float:
    """The seconds of all rounds that `fedprompt run --estimate` expects."""
    path = folder / "estimate.yaml"
    path.write_text(yaml.safe_dump({**settings, "name": "estimate"}), encoding="utf-8")
    _, said = spent([sys.executable, "-m", "fedprompt.cli", "run", str(path), "--estimate", "--json"], folder)
    return float(json.loads(said)[0]["total"])


def ours(folder: Path, settings: dict[str, Any], name: str) -> tuple[Spent, dict[str, float]]:
    """What our side spent, and the seconds of its rounds by phase."""
    from fedprompt.runs.run import Run

    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**settings, "name": name}), encoding="utf-8")
    found, _ = spent([sys.executable, "-m", "fedprompt.cli", "run", str(path)], folder)
    (directory,) = (folder / "runs").glob(f"{name}-*")
    run = Run(directory)
    try:
        records = run.rounds()
    finally:
        run.close()
    summary = records[-1].summary
    assert summary is not None
    phases: dict[str, float] = {}
    for record in records:
        for phase, seconds in record.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return replace(found, average=summary["average"], loss=records[-1].loss), phases


def plain(folder: Path, program: str) -> Spent:
    found, said = spent([sys.executable, str(HERE / "plain" / f"{program}.py"), str(folder)], folder)
    told = json.loads(said.strip().splitlines()[-1])
    return replace(found, average=told["average"], loss=told["loss"])


def in_flower(folder: Path, program: str, expected: float) -> float:
    """Seconds of the same program in Flower's simulation, and of the start of Ray; it must have learned the same."""
    python = environment("flower")
    with tempfile.TemporaryDirectory(prefix="fb") as scratch:  # a short name: Ray makes sockets in it
        command = [str(python), str(HERE / "plain" / f"{program}.py"), str(folder), scratch]
        where = {**QUIET, "FLWR_HOME": scratch, "PYTHONPATH": str(HERE / "plain")}
        found, said = spent(command, folder, where)
    require_near(parsed(said.strip().splitlines()[-1])["average"], expected)
    return found.wall


def require_near(average: float, expected: float) -> None:
    """Times of sides that learn different things cannot be compared."""
    if abs(average - expected) > POINTS_APART:
        raise Unavailable(f"learned something else: {average:.3f}, {expected:.3f} of ours")


def require_same_loss(loss: float | None, expected: float | None) -> None:
    """Towers of random weights recognise nothing, so accuracies alone would say little."""
    if loss is None or expected is None or abs(loss - expected) > LOSSES_APART * expected:
        raise Unavailable(f"learned something else: a loss of {loss}, {expected} of ours")


def flops(folder: Path, settings: dict[str, Any], rounds: int) -> float:
    """Of a warm run of that many rounds, all of which do the same products."""
    path = folder / "count.yaml"
    federation = {**settings["federation"], "rounds": 1}
    path.write_text(yaml.safe_dump({**settings, "name": path.stem, "federation": federation}), encoding="utf-8")
    return rounds * float(printed([sys.executable, str(HERE / "count_flops.py"), str(path)], SECONDS)["flops"])


def gemm_peak() -> float:
    """FLOPs a second of a large float32 product on one thread."""
    import torch

    torch.set_num_threads(1)
    left, right = (torch.randn(PEAK_SIDE, PEAK_SIDE) for _ in range(2))
    least = float("inf")
    for _ in range(PEAK_REPEATS):
        began = time.perf_counter()
        torch.mm(left, right)
        least = min(least, time.perf_counter() - began)
    return float(2 * PEAK_SIDE**3 / least)


def class_names(settings: dict[str, Any]) -> Sequence[str]:
    """Of a job's images."""
    from fedprompt.config import parse
    from fedprompt.data.sources.open import open_source
    from fedprompt.io.files import cache_directory

    return open_source(parse(settings).data, cache_directory()).class_names


def shared_assets(cache: Path) -> None:
    """A cache with the frozen weights, and without pixels and features."""
    from fedprompt.io.files import cache_directory

    cache.mkdir()
    for name in ASSETS:
        if (cache_directory() / name).is_dir():
            (cache / name).symlink_to(cache_directory() / name)


def measure(work: Work, data: Path | None, folder: Path) -> dict[str, Any]:
    """Everything about one job."""
    shared_assets(folder / "cache")
    settings = config(work, data, folder)
    source = work.kind[0] if data is not None else "embedded"
    told = {**settings, "data": {**settings["data"], "source": source}, "output": {"threads": 1}}
    if work.kind is CLIP:
        told["backbone"] = {**settings["backbone"], "name": work.kind[1]}
        write_clip(folder / "clip", class_names(settings))
    found: dict[str, Any] = {"what": work.what, "config": told}
    cold, _ = ours(folder, settings, f"cold-{work.letter}")
    expected = estimated(folder, settings)
    warm, phases = ours(folder, settings, f"warm-{work.letter}")
    found |= {"cold": asdict(cold), "warm": asdict(warm), "flops": flops(folder, settings, work.rounds)}
    found |= {"estimated seconds of the rounds": expected, "seconds of the rounds": sum(phases.values())}
    found["seconds by phase"] = phases
    if not work.plain:
        return found
    try:
        prepare(folder, settings)
        beside = plain(folder, work.plain)
        found["plain"] = asdict(beside)
        require_near(beside.average, cold.average)
        if work.kind is CLIP:
            require_same_loss(beside.loss, cold.loss)
    except Unavailable as error:
        found["why"] = str(error)
    if work.flower:
        try:
            found["flower"] = in_flower(folder, work.flower, cold.average)
        except Unavailable as error:
            found["why flower"] = str(error)
    return found
