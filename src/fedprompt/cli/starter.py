"""Commands for the first minutes: a config for images of one's own, and the demo."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedprompt.cli.completion import complete_backbone, complete_method, complete_scheme
from fedprompt.cli.options import AsJson, Overrides, Plugins, Quiet, Seeds, emit, load
from fedprompt.cli.run_configs import launch, say
from fedprompt.config.shipped_configs import FOLDER
from fedprompt.errors import ConfigError, DataError, StorageError, broken, did_you_mean, same_name
from fedprompt.io.safe_text import safe_line, safe_text

if TYPE_CHECKING:
    from fedprompt.data.survey import Survey
    from fedprompt.experiment.proposal import Choice, Proposal, Wishes

DEMO = FOLDER / "demo.yaml"
SHOWN = 5  # names or files of a long list


def init(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A folder of images, a .parquet or .csv file, or a hub id owner/name.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The config to write; NAME.yaml here when absent.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the config if it exists.")] = False,
    scheme: Annotated[
        str | None,
        typer.Option(help="How clients differ, such as domains or dirichlet.", autocompletion=complete_scheme),
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="The frozen model; see `fedprompt backbones`.", autocompletion=complete_backbone)
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="The method; see `fedprompt methods`.", autocompletion=complete_method)
    ] = None,
    compare: Annotated[
        bool | None, typer.Option("--compare/--no-compare", help="Also train alone, and one model for all.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take what is proposed.")] = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Look at your images, propose an experiment, and write its config."""
    from fedprompt.config import DataConfig
    from fedprompt.data.sources.open import open_whole
    from fedprompt.data.survey import survey
    from fedprompt.io.files import cache_directory

    source = _source(path)
    target = output or Path(f"{_stem(source)}.yaml")
    if target.exists() and not force:
        raise ConfigError(broken("--output", "be a file that does not exist yet, or --force be given", str(target)))
    opened = open_whole(DataConfig(source=source), cache_directory())
    if opened.holds == "sentences":
        instead = "; for texts write a config with backbone.name: minilm, as docs/texts.md shows"
        raise DataError(broken("PATH", "hold images", opened.holds) + instead)
    found = survey(opened, Path(source).expanduser())
    if not as_json:
        typer.echo(safe_text("\n".join(map(safe_line, _description(opened.name, found)))))
    if len(found.classes) < 2:
        raise ConfigError(broken("PATH", "have images of at least two classes", list(found.classes)))
    from fedprompt.experiment.proposal import Proposal, Wishes

    asks = not yes and not as_json and sys.stdin.isatty()
    proposal = Proposal(opened)
    wishes, reasons = _decided(proposal, source, Wishes(scheme, clients, backbone, method, compare), asks)
    _write(target, proposal, source, found, wishes, reasons)
    command = f"{_program()} run {shlex.quote(str(target))}"
    page = f"{_program()} report runs/{target.stem}-* --output runs/report-{target.stem}"
    rows = {name: {"value": choice.value, "reason": choice.reason} for name, choice in reasons.items()}
    lines = [
        "",
        *(f"{name:10} {_shown(choice.value)}: {choice.reason}" for name, choice in reasons.items()),
        "",
        f"wrote {target}",
    ]
    lines += [f"Before a run: remove or repair the {len(found.broken)} broken images."] if found.broken else []
    data = {"config": str(target), "next": command, "then": page, "survey": vars(found), "proposal": rows}
    emit(data, as_json, "\n".join([*lines, f"next: {command}", f"then: {page}"]))


def demo(
    overrides: Overrides = None,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Fetch what the demo needs, run it with three seeds, and write its report. Stop it at any time: the same command goes on."""
    configs = load(DEMO, overrides, seed or ["0,1,2"])
    from fedprompt.backbones.catalog import NAMED
    from fedprompt.cli.doctor import DATA_SET, asset_rows, fetch
    from fedprompt.io.files import cache_directory
    from fedprompt.report.html_report import write_report

    cache = cache_directory(configs[0].output.cache)
    present = {row["name"]: row["present"] for row in asset_rows(cache)}
    needed = [asset for each in configs for asset in getattr(NAMED.get(each.backbone.name), "assets", ())]
    needed += [DATA_SET if each.data.source == "embedded" else each.data.source for each in configs]
    for name in dict.fromkeys(needed):
        if not present.get(name, True):
            say(f"fetching {name}: only once")
            fetch(name, cache)
    done = launch(configs, resume=True, quiet=quiet, as_json=as_json)
    made = write_report(done, Path(configs[0].output.directory) / f"report-{DEMO.stem}", False)
    say(f"report: {made.html}")


def _source(path: str) -> str:
    """What a config says for a path: a hub id is told by its form where nothing is called so."""
    from fedprompt.backbones.hub_download import is_hub_id
    from fedprompt.data.sources.open import NAMED

    known = path in NAMED or path.startswith("hub:") or Path(path).expanduser().exists()
    if known or path.startswith((".", "/", "~")) or Path(path).parent.is_dir() or not is_hub_id(path):
        return path
    return f"hub:{path}"


def _stem(source: str) -> str:
    """The name of the config: that of the data, as runs can be called."""
    from fedprompt.config.config_files import file_name

    stem = Path(source.removeprefix("hub:").partition(":")[0]).expanduser().resolve().name
    name = file_name(stem.removesuffix(".parquet").removesuffix(".csv").removesuffix(".tsv")).lstrip("._+-")
    return name or "experiment"


def _description(name: str, found: Survey) -> list[str]:
    """What was found, line by line."""
    counts = sorted(found.classes.values())
    lines = [f"{name}: {found.images:,} images"]
    lines.append(f"classes    {len(found.classes)}: {_some(found.classes)}; {_range(counts)}")
    if found.domains:
        held = sorted(found.domains.values())
        lines.append(f"domains    {len(found.domains)}: {_some(found.domains)}; {_range(held)}")
    parts = ", ".join(f"{split} {count:,}" for split, count in found.splits.items())
    lines.append(f"split      {parts or 'none: some images become test images'}")
    width, height = found.median_size
    lines.append(
        f"size       {width} x {height} pixels (median), sides of {found.smallest_side} to {found.largest_side}"
    )
    if found.examined < found.images:
        lines.append(f"           {found.examined:,} images were looked at, drawn at random")
    if found.broken:
        lines.append(f"WARNING    {len(found.broken)} broken images, a run stops at the first one it meets:")
        lines += [f"           {sentence}" for sentence in found.broken[:SHOWN]]
        lines += [f"           and {len(found.broken) - SHOWN} more"] if len(found.broken) > SHOWN else []
    if found.unread:
        what = ", ".join(f"{count} {ending}" for ending, count in found.unread.items())
        lines.append(f"WARNING    files in formats that are not read: {what}. Convert them to JPEG or PNG.")
    if found.codes:
        lines.append(
            f"note       class names that are codes ({_some(found.codes)}): a method that reads class names needs words"
        )
    return lines


def _range(counts: list[int]) -> str:
    least, most = counts[0], counts[-1]
    return f"{least:,} images each" if least == most else f"{least:,} to {most:,} images each"


def _some(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")


def _decided(proposal: Proposal, source: str, wishes: Wishes, asks: bool) -> tuple[Wishes, dict[str, Choice]]:
    """Every decision with its reason: the user's own, or what is proposed where no question can be asked."""
    from fedprompt.config.registries import BACKBONES, PARTITIONS
    from fedprompt.core import registry
    from fedprompt.experiment.proposal import GIVEN, Choice

    reasons: dict[str, Choice] = {}

    def decide(name: str, question: str, proposed: Choice, read: Callable[[str], Any]) -> None:
        nonlocal wishes
        given = getattr(wishes, name)
        if given is not None:
            proposed = Choice(read(str(given)), GIVEN)
        elif asks:
            answer = _asked(question, proposed, read)
            proposed = proposed if answer == proposed.value else Choice(answer, GIVEN)
        wishes = replace(wishes, **{name: proposed.value})
        reasons[name] = proposed

    schemes = [name for name in PARTITIONS.names() if name not in PARTITIONS.words]
    decide("scheme", "How do clients differ?", proposal.scheme(), lambda text: _named("scheme", text, schemes))
    if wishes.method is not None:
        wishes = replace(wishes, method=_named("method", wishes.method, list(registry.methods())))
    decide("clients", "How many clients?", _fitting(proposal, source, wishes), _whole)
    decide(
        "backbone", "Which backbone?", proposal.backbone(wishes.method), lambda text: _backbone(text, BACKBONES.names())
    )
    known = list(registry.methods())
    proposed = proposal.method(str(wishes.backbone), str(wishes.scheme))
    decide("method", "Which method?", proposed, lambda text: _fits(_named("method", text, known), str(wishes.backbone)))
    head = proposal.head(str(wishes.method))
    if head is not None:
        reasons["head"] = head
    others = " and ".join(choice.value for choice in proposal.baselines(str(wishes.method)))
    if others:
        decide(
            "compare",
            f"Compare with {others}?",
            Choice(True, f"with {others}, to see what the method is worth"),
            _truth,
        )
    return wishes, reasons


def _fitting(proposal: Proposal, source: str, wishes: Wishes) -> Choice:
    """The largest number of clients up to the proposed one into which the images can be divided."""
    proposed = proposal.clients(str(wishes.scheme))
    for clients in range(proposed.value, 1, -1):
        tried = proposal.settings(source, replace(wishes, clients=clients, backbone="", method=""))
        if proposal.divisible(tried) is None:
            reason = proposed.reason if clients == proposed.value else "as many as the images allow"
            return replace(proposed, value=clients, reason=reason)
    return proposed


def _shown(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _asked(question: str, proposed: Choice, read: Callable[[str], Any]) -> Any:
    """The answer to a question on the terminal; what cannot be read is asked again."""
    shown = _shown(proposed.value)
    typer.echo(safe_text(f"\n{question} Proposed: {shown} ({proposed.reason})"))
    while True:
        try:
            return read(typer.prompt("  Enter to accept, or type another", default=shown))
        except ConfigError as error:
            typer.echo(safe_line(f"  {error}"))
        except typer.Abort:  # Ctrl-C, or the end of what is typed: nothing was written
            raise KeyboardInterrupt from None


def _named(what: str, text: str, names: list[str]) -> str:
    found = same_name(text.strip(), names)
    if found is None:
        raise ConfigError(broken(f"--{what}", f"be one of {', '.join(names)}", text) + did_you_mean(text, names))
    return found


def _fits(method: str, backbone: str) -> str:
    """The method; an error where it reads class names and the backbone has no text tower."""
    from fedprompt.backbones.catalog import NAMED
    from fedprompt.core.method import require_text_tower
    from fedprompt.experiment.proposal import reads_names

    require_text_tower(not reads_names(method) or backbone not in NAMED or NAMED[backbone].text)
    return method


def _backbone(text: str, names: list[str]) -> str:
    """A name, or what may be a path or a hub id; the check of the config decides on these."""
    text = text.strip()
    return text if "/" in text or Path(text).expanduser().exists() else _named("backbone", text, names)


def _whole(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(broken("--clients", "be a whole number of at least 1", text))
    return int(text)


def _truth(text: str) -> bool:
    answer = text.strip().lower()
    if answer not in ("yes", "y", "true", "no", "n", "false"):
        raise ConfigError(broken("--compare", "be yes or no", text))
    return answer in ("yes", "y", "true")


def _write(
    target: Path, proposal: Proposal, source: str, found: Survey, wishes: Wishes, reasons: dict[str, Choice]
) -> None:
    """Write the config, once it is known that a run accepts it."""
    from fedprompt import config as configuration
    from fedprompt.cli.starter_config import config_text
    from fedprompt.experiment.rehearsal import Rehearsal
    from fedprompt.io.files import write_atomically

    settings = proposal.settings(source, wishes)
    refusal = proposal.divisible(settings)
    if refusal is not None:
        raise refusal
    baselines = proposal.baselines(str(wishes.method)) if wishes.compare else []
    chosen: dict[str, Any] = {"name": wishes.method} | ({"head": reasons["head"].value} if "head" in reasons else {})
    why = "; ".join(reasons[name].reason for name in ("method", "head") if name in reasons)
    methods = [*(({"name": each.value}, each.reason) for each in baselines), (chosen, why)]
    for method, _ in methods:
        Rehearsal().check(configuration.parse({**settings, "method": method}))
    head = [f"{found.images:,} images, {len(found.classes)} classes: {_some(found.classes)}"]
    head += [
        "Written by `fedprompt init`. Change what you like: docs/settings.md lists all settings.",
        f"  fedprompt run {target}",
    ]
    text = config_text(head, settings, _why(proposal, settings, reasons), methods)
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        raise StorageError(f"--output: cannot write {str(target)!r}: {error.strerror}") from error


def _why(proposal: Proposal, settings: dict[str, Any], reasons: dict[str, Choice]) -> dict[str, str]:
    """The comments of a config by setting."""
    per_client = "so that a client takes several steps in an epoch"
    limits = {f"data.{name}": choice.reason for name, choice in proposal.limits().items()}
    stem = {"backbone.stem": "no prompt enters the first 8 of 12 blocks: their output is computed once"}
    return {
        **limits,
        "partition.scheme": reasons["scheme"].reason,
        "partition.clients": reasons["clients"].reason,
        "partition.alpha": "smaller values make clients less alike",
        "backbone.name": reasons["backbone"].reason,
        **(stem if "stem" in settings["backbone"] else {}),
        "train.batch_size": per_client,
    }


def _program() -> str:
    """How this program is called here."""
    if shutil.which("fedprompt"):
        return "fedprompt"
    called = Path(sys.argv[0])
    return shlex.quote(str(called)) if called.name == "fedprompt" else f"{shlex.quote(sys.executable)} -m fedprompt.cli"
