"""The first page of a method that has none: all that its code tells. The idea and the equations are then written by hand."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import yaml
from method_pages import OTHERS

from fedprompt.backbones.random_weights import TINY_CLIP_SHAPE, random_vit, tiny_clip
from fedprompt.core.method import Method, World
from fedprompt.core.roles import Roles
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.modules.heads import NAMES
from fedprompt.random_streams import SERVER, stream

UNKNOWN = "–"
AVERAGE = r"""
The server averages what is shared, $\theta$, with $p_k$ the share of client $k$:

$$
\theta \leftarrow \sum_k p_k\, \theta_k
$$
"""
OWN_RULE = "\nWhat the server makes of the uploads of client $k$ is the method's own `aggregate`.\n"


def new_page(name: str, cls: type[Method], family: str) -> str:
    """The page with empty places for what is generated."""
    wrapped = family == "variants"
    roles = declared(cls(inner=FedVPT(head="shared")) if wrapped else cls())  # type: ignore[call-arg]
    about = (cls.__doc__ or "").strip().split("\n")[0]
    kind = "variant" if wrapped else "method"
    on = {"vision": "on any vision transformer", "variants": "around another method"}.get(
        family, "on a [dual encoder](../backbones.md#dual-encoders)"
    )
    given = {"vision": f"method={name}", "variants": f"method=fedvpt_deep variant={name} train.momentum=0"}.get(
        family, f"method={name} backbone.name=mini train.lr=0.1"
    )
    averaged = cls.aggregate is Method.aggregate and roles.shared
    return f"""---
{yaml.safe_dump(row(family, about, roles), sort_keys=False, allow_unicode=True, width=1000)}---

# {cls.__name__}

{about}

- **In configs** `{kind}: {{name: {name}}}`, {on}.

## Rule
{inspect.cleandoc(sys.modules[cls.__module__].__doc__ or about)}
{AVERAGE if averaged else OWN_RULE}
## What travels
{travels(roles)}

## Settings
<!-- generated: options -->
<!-- end -->

## Command
```
fedprompt run configs/demo.yaml name=try {given}
```

## Numbers
<!-- generated: numbers -->
<!-- end -->
"""


def declared(method: Method) -> Roles:
    """The tensors of a method in a small world that has everything."""
    classes = tuple("0123456789")
    language = tiny_clip(random_vit(TINY_CLIP_SHAPE)).language(classes)
    world = World(384, 12, 17, 14, classes, tuple("abcdef"), language=language)
    return method.init(world, stream(0, 0, SERVER, "init"))


def row(family: str, about: str, roles: Roles) -> dict[str, Any]:
    """What stands on the page of all methods, as far as declarations tell."""
    if family == "variants":
        return {"group": "Variants", "rule": about, "refused": UNKNOWN}
    said = {"group": OTHERS, "personal": listed(roles.local), "up": listed([*roles.shared, *roles.stat])}
    if family == "text":
        return {**said, "learned": listed([*roles.shared, *roles.local])}
    owners = [role for role in ("shared", "local", "server") if set(NAMES) & set(getattr(roles, role))]
    return {**said, "prompts": UNKNOWN, "head": ", ".join(owners) or "none"}


def travels(roles: Roles) -> str:
    told = {
        "Up and down": (roles.shared, "shared"),
        "Up": (roles.stat, "statistics"),
        "Never leaves the server": (roles.server, "server"),
        "Stays": (roles.local, "local"),
    }
    return " ".join(f"{where}: {listed(names)} ({role})." for where, (names, role) in told.items() if names)


def listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"
