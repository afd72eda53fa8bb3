"""The findings of an audit as a plain table, one line a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOTHING = "–"


def leak_table(findings: Sequence[Mapping[str, Any]]) -> str:
    """AUC of every adversary and score with its standard error, the leak of prototypes, and the spread of clients."""
    rows = [_cells(finding) for finding in findings]
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in rows[0]}
    lines = ["  ".join(title.ljust(width) for title, width in widths.items())]
    lines += ["  ".join(row[title].ljust(width) for title, width in widths.items()) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), *_remarks(findings)])


def _cells(finding: Mapping[str, Any]) -> dict[str, str]:
    prototypes, fairness = finding["prototypes"], finding["fairness"]
    scores = {
        f"{who} {score}": _area((finding["membership"][who] or {}).get(score))
        for who in ("server", "insider")
        for score in ("update", "loss")
    }
    return {
        "run": finding["run"],
        "privacy": privacy_text(finding["privacy"]),
        **scores,
        "prototypes": _area(prototypes and prototypes["membership"]),
        "nearest": _per_cent(prototypes and prototypes["nearest_is_member"], prototypes and prototypes["by_chance"]),
        "small rows": f"{prototypes['small_rows']}/{prototypes['rows']}" if prototypes else NOTHING,
        "std": _per_cent(fairness and fairness["std"]),
        "spread": _per_cent(fairness and fairness["spread"]),
    }


def privacy_text(privacy: Mapping[str, Any] | None) -> str:
    """`none`, or the place and strength of the noise and what was spent: `client z=1 epsilon=12.3`."""
    if privacy is None:
        return "none"
    noise = [] if privacy["noise"] is None else [f"z={privacy['noise']:g}"]
    spent = [] if privacy["epsilon"] is None else [f"epsilon={privacy['epsilon']:.3g}"]
    return " ".join([privacy["noise_at"], *noise, *spent])


def _area(area: Mapping[str, float] | None) -> str:
    return NOTHING if area is None else f"{area['auc']:.3f} ± {area['error']:.3f}"


def _per_cent(value: float | None, chance: float | None = None) -> str:
    if value is None:
        return NOTHING
    return f"{100 * value:.1f}" + ("" if chance is None else f" ({100 * chance:.1f})")


def _remarks(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    early = [f"{finding['run']}: read {finding['seen']}" for finding in findings if finding["seen"] != "as uploaded"]
    still = [
        f"{finding['run']}: audited at the full learning rate, of which its schedule leaves {finding['rate_share']:.0%} in that round"
        for finding in findings
        if finding["rate_share"] < 1
    ]
    return [
        "AUC with standard error, 0.5 is a guess; nearest, std and spread in per cent, by chance in brackets.",
        *early,
        *still,
    ]
