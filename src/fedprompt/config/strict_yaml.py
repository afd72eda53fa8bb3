"""YAML texts as plain values, read with limits."""

from __future__ import annotations

import re
from typing import Any

import yaml

MOST_BYTES = 2**18  # of a text
MOST_NODES = 10_000  # keys and values in it
MOST_LEVELS = 16  # of sections inside sections


class Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, which YAML 1.1 reads as text, and a key is a text that stands once.

    A text of few bytes cannot become many values: nodes and levels are counted, an alias as all that it stands for.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = self._levels = self._anchored = 0
        self._sizes: dict[str, int] = {}  # nodes by anchor

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor, is_alias = event.anchor, isinstance(event, yaml.AliasEvent)
        if is_alias and self._anchored:
            raise yaml.YAMLError(f"*{anchor}: a value with an anchor must not hold aliases")
        before = self._nodes
        self._nodes += self._sizes.get(anchor, 0) if is_alias else 1
        self._levels += 1
        if self._nodes > MOST_NODES or self._levels > MOST_LEVELS:
            raise yaml.YAMLError(f"must have at most {MOST_NODES} keys and values in {MOST_LEVELS} levels, got more")
        is_anchor = anchor is not None and not is_alias
        self._anchored += is_anchor
        node = super().compose_node(parent, index)
        self._anchored -= is_anchor
        self._levels -= 1
        if is_anchor:
            self._sizes[anchor] = self._nodes - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.YAMLError(f"{key!r} must be a text to be a key; put it in quotes")
            if key in keys:
                raise yaml.YAMLError(f"{key!r} is given twice")
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        value = int(self.construct_yaml_int(node))
        if abs(value) >= 2**63:
            raise yaml.YAMLError("a whole number must have at most 64 bits")
        return value


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_whole_number)


def read_yaml(text: str) -> Any:
    """The plain values of a YAML text; a YAMLError where it is malformed, or too large to be one of ours."""
    if len(text) > MOST_BYTES:
        raise yaml.YAMLError(f"must have at most {MOST_BYTES} characters, got {len(text)}")
    try:
        return yaml.load(text, Loader=Loader)
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        OverflowError,
    ) as error:  # of values that belie their tag
        raise yaml.YAMLError(str(error)) from error
