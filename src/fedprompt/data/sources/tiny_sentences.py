"""Sentences for tests: five kinds of things in four styles of writing, made in milliseconds."""

from __future__ import annotations

from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources.sentences import SentenceSource

TRAIN, TEST = 12, 6  # sentences per (domain, class)
THINGS = {
    "fruit": ("apple", "pear", "plum", "melon"),
    "metal": ("iron", "zinc", "tin", "gold"),
    "sport": ("judo", "golf", "polo", "rugby"),
    "music": ("jazz", "opera", "waltz", "samba"),
    "bird": ("wren", "crow", "swan", "owl"),
}
STYLES = {
    "note": "{one} and {other}",
    "letter": "dear friend i like {one} and also {other} best wishes",
    "question": "what about {one} or {other}",
    "shout": "{one} {one} {other} now",
}


def tiny_sentences() -> SentenceSource:
    """360 sentences, of which a third is for tests."""
    generator = stream(0, "tiny sentences")
    texts, labels, domains, splits = [], [], [], []
    for style, pattern in STYLES.items():
        for thing, words in THINGS.items():
            for number in range(TRAIN + TEST):
                one, other = generator.choice(words, 2)
                texts.append(pattern.format(one=one, other=other))
                labels.append(thing)
                domains.append(style)
                splits.append("train" if number < TRAIN else "test")
    return SentenceSource(
        "tiny-text",
        texts,
        labels,
        classes=tuple(THINGS),
        domains=domains,
        domain_names=tuple(STYLES),
        splits=splits,
    )
