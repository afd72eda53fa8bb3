"""A site's own images in a federation of sites: the agreed class names, the split, and what the server records.

Sites never see each other's images: they only have to agree on the class names.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from fedprompt.config import DataConfig, complaints
from fedprompt.data.partition import client_names
from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.data.partition.manifest import Clients, Manifest
from fedprompt.data.partition.split import train_and_test
from fedprompt.data.sources.base import MOST_NAMES, NO_DOMAINS, Source
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.subset import Selection
from fedprompt.errors import ConfigError, DataError, broken

LONGEST_CLASS = 200  # letters of a class name
FEWEST_CLASSES = 2  # of a federation
SHOWN = 10  # names that a refusal lists
SITES = "sites"  # source and scheme of a run whose clients hold their own images

_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters and halves of characters
_BLANKS = re.compile(r"[\s_-]+")


def open_site(source: str, format: str, data: DataConfig, cache: Path) -> Source:
    """The images of a site; of the federation's settings only those apply that choose among images of known classes."""
    try:
        own = DataConfig.model_validate(
            {**data.model_dump(), "source": source, "format": format, "classes": None, "novel": 0.0, "options": {}}
        )
    except ValidationError as error:
        raise ConfigError(complaints(error, "data")) from error
    with _about_own_data():
        return open_source(own, cache)


@dataclass(frozen=True)
class Agreement:
    """The classes of a federation in their order, None without agreement, and why sites are excluded."""

    class_names: tuple[str, ...] | None
    refused: dict[str, str] = field(default_factory=dict)
    """Site -> sentence."""


def agree(proposals: Mapping[str, Sequence[str]], wanted: Sequence[str] | None) -> Agreement:
    """Which class names a federation has, and which sites cannot take part in it.

    If the federation lists its classes (`wanted`), a site may lack some of them but have no others. If not, all sites
    must have the same names: if they differ, it is unknown which are right. What a site proposes is untrusted input: a
    fault in it is a reason to refuse the site, never an error here.
    """
    if wanted is not None:
        complaint = _complaint(wanted, FEWEST_CLASSES, "data.classes")
        if complaint is not None:
            raise ConfigError(complaint)
    least = FEWEST_CLASSES if wanted is None else 1
    refused = {
        site: complaint for site, names in proposals.items() if (complaint := _complaint(names, least)) is not None
    }
    sound = {site: frozenset(names) for site, names in proposals.items() if site not in refused}
    if wanted is not None:
        return Agreement(tuple(wanted), refused | _strangers(sound, wanted))
    if len(set(sound.values())) > 1:
        return Agreement(None, refused | _differences(sound))
    return Agreement(tuple(sorted(next(iter(sound.values())))) if sound else None, refused)


class Agreed(Selection):
    """A site's images with labels that count the agreed classes. It may lack some of them, but have no others."""

    def __init__(self, whole: Source, class_names: Sequence[str]) -> None:
        for stranger in sorted(set(whole.class_names) - set(class_names))[:1]:
            rule = "hold only classes of the federation"
            raise DataError(broken("--data", rule, f"{stranger!r} in {whole.name!r}"))
        super().__init__(whole, np.arange(len(whole)), tuple(class_names))
        self.own = whole
        self.fingerprint = whole.fingerprint  # the same images in the same order: cached features are found


def site_manifest(source: Source, data: DataConfig, names: Sequence[str], place: int) -> Manifest:
    """The images of a site as those of client `place` among all sites; of the others nothing is known here.

    The split depends on the site's own order of classes: with the agreed order, the server could choose among splits.
    """
    own = source.own if isinstance(source, Agreed) else source
    with _about_own_data():
        train, test = train_and_test(own, data, every_class=False)
    settings = data.model_dump(mode="json", exclude={"source", "format", "classes", "novel", "resize"})
    return Manifest(
        source_name=source.name,
        source_fingerprint=source.fingerprint,
        class_names=source.class_names,
        domain_names=source.domain_names,
        clients=_clients(names, {place: (train, test)}),
        scheme={"scheme": SITES, "data": settings},
    )


def sites_manifest(names: Sequence[str], class_names: Sequence[str]) -> Manifest:
    """What the server records of a federation whose images it never sees: clients and class names."""
    identity = json.dumps([SITES, list(names), list(class_names)])
    return Manifest(
        source_name=SITES,
        source_fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        class_names=tuple(class_names),
        domain_names=NO_DOMAINS,
        clients=_clients(names, {}),
        scheme={"scheme": SITES},
    )


def _clients(names: Sequence[str], held: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> Clients:
    """Clients, of which only some have images."""
    nothing = np.array([], dtype=np.int64)
    lists = [held.get(place, (nothing, nothing)) for place in range(len(names))]
    parts = (IndexLists.of([each[part] for each in lists]) for part in range(2))
    return Clients(client_names.compact(list(names)), *parts)


@contextmanager
def _about_own_data() -> Iterator[None]:
    """Errors about `data.source` name the data this site was started with."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("data.source", "--data", 1)) from error


def _complaint(names: object, least: int, what: str = "class names") -> str | None:
    """What is wrong with a list of class names by itself."""
    if not isinstance(names, list | tuple):
        return broken(what, "be a list", type(names).__name__)
    if not least <= len(names) <= MOST_NAMES:
        return broken(what, f"be {least} to {MOST_NAMES}", len(names))
    for name in names:
        if not isinstance(name, str):
            return broken(what, "be text", type(name).__name__)
        if not name.strip() or len(name) > LONGEST_CLASS or _UNFIT.search(name):
            rule = f"have 1 to {LONGEST_CLASS} letters, not all blank, and no control characters"
            return broken(what, rule, name[: LONGEST_CLASS + 1])
    for name, times in Counter(names).items():
        if times > 1:
            return broken(what, "hold every class once", name)
    return None


def _strangers(sites: Mapping[str, frozenset[str]], wanted: Sequence[str]) -> dict[str, str]:
    """For every site, its classes that the federation does not have."""
    known, alike = frozenset(wanted), {_plain(name): name for name in wanted}
    refused = {}
    for site, names in sites.items():
        unknown = {name: alike.get(_plain(name)) for name in sorted(names - known)}
        if unknown:
            refused[site] = f"class names must be among those of the federation, got {_listed(unknown)}"
    return refused


def _differences(sites: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """For every site, how its classes differ from those of the others."""
    holders = Counter(name for names in sites.values() for name in names)
    disputed = {name: _plain(name) for name in sorted(holders) if holders[name] < len(sites)}
    refused = {}
    for site, names in sites.items():
        lacking = [name for name in disputed if name not in names]
        alike = {disputed[name]: name for name in lacking}
        own = {name: alike.get(plain) for name, plain in disputed.items() if name in names}
        parts = {
            "only this site has": {name: meant for name, meant in own.items() if holders[name] == 1},
            "not every other site has": {name: meant for name, meant in own.items() if holders[name] > 1},
            "this site lacks": dict.fromkeys(lacking),
        }
        differences = "; ".join(f"{what} {_listed(which)}" for what, which in parts.items() if which)
        refused[site] = f"class names must be the same at all sites, unless data.classes lists them: {differences}"
    return refused


def _listed(names: Mapping[str, str | None]) -> str:
    """Some of these names with the probably intended one; those that have one come first."""
    order = sorted(names, key=lambda name: names[name] is None)
    shown = [f"{name!r} (did you mean {names[name]!r}?)" if names[name] else repr(name) for name in order[:SHOWN]]
    more = len(order) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _plain(name: str) -> str:
    """A name without case, outer blanks and the characters that join its words."""
    return _BLANKS.sub(" ", unicodedata.normalize("NFKC", name)).strip().casefold()
