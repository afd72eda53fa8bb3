"""The audit of a run: what its uploads leak (`evaluation.leak_attacks`), its privacy, and its fairness.

Nothing is written: the run file is opened for reading, and clients take part once more in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedprompt.client.client_states import ClientStates
from fedprompt.client.factory import ExperimentFactory
from fedprompt.client.stored_settings import (
    require_images,
    require_partition,
    require_weights,
    settings_here,
)
from fedprompt.config import Config
from fedprompt.core import wire
from fedprompt.core.method import Server
from fedprompt.engines.remote.node_state import stored_state
from fedprompt.errors import RunError
from fedprompt.evaluation.leak_attacks import Audit, Row
from fedprompt.federation.stored_pool import open_pool
from fedprompt.metrics.auc import Area, mean_area
from fedprompt.privacy.budget import Budget
from fedprompt.runs.run import Run, require_same_ground, require_same_streams
from fedprompt.runs.store import PRIVACY

SMALL = 5  # rows of fewer images are counted as small

Finding = dict[str, Any]  # plain figures of one run, as JSON prints them


def open_audit(
    run: Run, weights: str | Path | None = None, data: str | Path | None = None, trust_config: bool = False
) -> Audit:
    """The federation of a run at its last finished round, on the data and weights it was trained with.

    Where these are not given, paths and hub ids in the config of the run are used only with `trust_config`.
    """
    state = run.reader.server_state()
    if state is None or state[0] < 1:
        raise RunError(f"run {str(run.directory)!r} must have a finished round to be audited, got none")
    if run.config.engine.kind == "flower":
        raise RunError(f"run {str(run.directory)!r} cannot be audited here: its images are at the sites")
    require_same_streams(run.reader, "audited")
    require_weights(run.config, run.directory, trust_config, weights)
    require_images(run.config, run.directory, trust_config, data)
    require_partition(run.config, run.directory, trust_config)
    factory = ExperimentFactory(settings_here(run.config, trust_config, weights, data))
    if factory.config.output.threads:
        torch.set_num_threads(factory.config.output.threads)
    source, manifest, backbone, world = factory.prepare()
    require_same_ground(run.reader, backbone.digest(), manifest, "audited")
    shared, own = ({name: tensor.to(world.device) for name, tensor in wire.decode(blob).items()} for blob in state[1:])
    pool, own = open_pool(run.reader, own, world)
    bank, states = factory.bank(source, manifest, backbone), ClientStates(stored_state(run.reader))
    terms = factory.client_runtime(source, world, bank, states).terms
    return Audit(
        config=factory.config,
        world=world,
        method=factory.method,
        bank=bank,
        states=states,
        domain_names=source.domain_names,
        server=Server(shared, own, state[0], pool),
        terms=terms,
        clip=Budget(factory.config, terms, run.reader.details(PRIVACY)).clip
        if terms and terms.settings.quantile
        else None,
    )


def audit_run(
    run: Run,
    clients: int | None = None,
    weights: str | Path | None = None,
    data: str | Path | None = None,
    trust_config: bool = False,
) -> Finding:
    """All figures of one run, over all of its clients or over some drawn at random; the rest is as for `open_audit`."""
    audit = open_audit(run, weights, data, trust_config)
    chosen = audit.sample(clients)
    areas: list[dict[str, dict[str, Area]]] = []
    rows: list[Row] = []
    for client in chosen:
        found, reply = audit.membership(client)
        areas.append(found)
        rows += audit.prototypes(reply)
    return {
        "run": run.name,
        "method": audit.config.label,
        "seed": audit.config.seed,
        "round": audit.server.round,
        "rate_share": audit.rate_share,
        "clients": len(chosen),
        "privacy": privacy_of(run),
        "seen": seen_of(audit.config),
        "membership": {who: _scores([each[who] for each in areas if who in each]) for who in ("server", "insider")},
        "prototypes": _prototypes(rows),
        "fairness": fairness(run),
    }


def _scores(found: Sequence[dict[str, Area]]) -> dict[str, Any] | None:
    means = {score: mean_area([each[score] for each in found]) for score in ("update", "loss")}
    return {score: mean.to_json() for score, mean in means.items() if mean is not None} or None


def _prototypes(rows: Sequence[Row]) -> dict[str, Any] | None:
    if not rows:
        return None
    membership = mean_area([row.membership for row in rows if row.membership is not None])
    return {
        "rows": len(rows),
        "single_rows": sum(row.members == 1 for row in rows),
        "small_rows": sum(row.members < SMALL for row in rows),
        "nearest_is_member": sum(row.nearest_is_member for row in rows) / len(rows),
        "by_chance": sum(row.members / (row.members + row.others) for row in rows) / len(rows),
        "membership": None if membership is None else membership.to_json(),
    }


def privacy_of(run: Run) -> dict[str, Any] | None:
    """The mechanism of a run, and what it has spent; None without one."""
    settings = run.config.privacy
    if settings is None:
        return None
    notes = run.reader.details(PRIVACY)
    last = notes[-1] if notes else {}
    return {
        **settings.model_dump(mode="json", include={"noise_at", "clip", "target_epsilon", "delta"}),
        "noise": _number(last.get("noise", settings.noise)),
        "epsilon": _number(last.get("epsilon")),
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def seen_of(config: Config) -> str:
    """At which step the upload was read."""
    if config.federation.secure_sum:
        return "before the secure sum"
    if config.privacy is not None and config.privacy.noise_at == "server":
        return "before the server's noise"
    return "as uploaded"


def fairness(run: Run) -> dict[str, float] | None:
    """Spread of the clients' test accuracies at the last evaluation; None without one."""
    accuracies = list(run.client_accuracies().values())
    if not accuracies:
        return None
    worst, best = min(accuracies), max(accuracies)
    return {"std": float(np.std(accuracies)), "worst": worst, "best": best, "spread": best - worst}
