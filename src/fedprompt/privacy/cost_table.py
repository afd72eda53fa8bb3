"""The privacy cost of a config, as text and as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedprompt.config import Config
from fedprompt.privacy.accounting import Plan, epsilon
from fedprompt.privacy.budget import Terms

SHOWN = 10  # rounds of a long run that are printed


def privacy_rows(config: Config, terms: Terms, plans: Sequence[Plan]) -> dict[str, Any]:
    """Noise, bound, neighbours and epsilon after every round."""
    settings, plan = terms.settings, plans[-1]
    spent = {round: epsilon(terms.noise, settings.delta, each) for round, each in enumerate(plans, start=1)}
    return {
        "run": config.run_name,
        "noise_at": settings.noise_at,
        "noise_multiplier": terms.noise,
        "clip": settings.clip,
        "delta": settings.delta,
        "neighbours": plan.neighbours,
        "clients": plan.clients,
        "cohort": plan.cohort,
        "sampling": plan.sampling,
        "surveys": plan.surveys,
        "releases": plan.releases,
        "epsilon": {str(round): value if math.isfinite(value) else None for round, value in spent.items()},
    }


def privacy_text(row: dict[str, Any]) -> str:
    what = "rounds" if row["noise_at"] == "server" else "releases of the client with the most"
    drawn = f"{row['cohort']:g} of {row['clients']} clients in a round ({row['sampling']})"
    survey = " and a survey before the first" if row["surveys"] else ""
    lines = [
        f"{row['run']}: noise multiplier {row['noise_multiplier']:.4f} at the {row['noise_at']}, clip {row['clip']}",
        f"  {drawn}; {row['releases']} {what}{survey}; delta {row['delta']:g}; hides: {row['neighbours']}",
    ]
    rounds = list(row["epsilon"].items())
    shown = rounds if len(rounds) <= SHOWN else [*rounds[: SHOWN // 2], *rounds[-SHOWN // 2 :]]
    figures = [f"{round}: {'inf' if value is None else f'{value:.3f}'}" for round, value in shown]
    return "\n".join([*lines, f"  epsilon after round {'  '.join(figures)}"])
