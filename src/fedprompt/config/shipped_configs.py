"""The configs of the package: `configs/demo.yaml` and others. Free of torch, like `fedprompt.config`.

Their names are paths, so that a command reads the same in a checkout, in an empty folder, and beside a copy: a file of
that path is taken first.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fedprompt.errors import ConfigError, broken, did_you_mean
from fedprompt.io.files import write_atomically

FOLDER = Path(__file__).parents[1] / "configs"
PREFIX = "configs"
FOR_EDITORS = "# yaml-language-server:"  # names the schema of the file


def names() -> list[str]:
    """All names, such as `configs/papers/pfedmoap/table1.yaml`; those of papers last."""
    found = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.yaml")]
    ordered = sorted(found, key=lambda path: (len(path.parts), path))
    return [PurePosixPath(PREFIX, *path.parts).as_posix() for path in ordered]


def located(path: str | Path) -> Path:
    """The file itself if it exists, else the config of the package that has this name, else the path as it is."""
    given = Path(path)
    if not given.exists() and given.as_posix() in names():
        return FOLDER.joinpath(*given.parts[1:])
    return given


def name_of(path: Path) -> str:
    """The name of a config of the package; of any other file its path."""
    if FOLDER in path.parents:
        return PurePosixPath(PREFIX, *path.relative_to(FOLDER).parts).as_posix()
    return str(path)


def shipped(name: str) -> Path:
    """The file behind a name; a name that is not known is an error with similar ones."""
    known = names()
    wanted = Path(name).as_posix()
    if wanted not in known:
        rule = "be a config of the package (`fedprompt configs` lists all)"
        raise ConfigError(broken("config", rule, name) + did_you_mean(wanted, known))
    return FOLDER.joinpath(*PurePosixPath(wanted).parts[1:])


def headline(path: Path) -> str:
    """The first line of the comment that a config begins with. A word to editors before it does not count."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((line for line in lines if not line.startswith(FOR_EDITORS)), "")
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def copy_to(path: Path, target: Path) -> None:
    """Write a copy whose editors find the schema of the package."""
    text = path.read_text(encoding="utf-8")
    if text.startswith(FOR_EDITORS):
        schema = FOLDER.with_name("schema.json")
        text = f"{FOR_EDITORS} $schema={schema}\n" + text.partition("\n")[2]
    write_atomically(target, text.encode())
