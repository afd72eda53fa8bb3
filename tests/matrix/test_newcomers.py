"""Every registered method, and every variant on FedVPT, in a federation from which clients are held out."""

from __future__ import annotations

from typing import Any

import pytest
from support import StopAfter, Stopped, content, run

from fedprompt.core import registry
from fedprompt.core.client_sampling import sample_newcomers
from fedprompt.core.method import Method
from fedprompt.methods.fedvpt import FedVPT

pytestmark = pytest.mark.matrix

CASES: dict[str, Method] = {
    **{name: cls() for name, cls in registry.methods().items()},
    **{f"fedvpt+{name}": cls(inner=FedVPT(head="shared")) for name, cls in registry.variants().items()},  # type: ignore[call-arg]
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(CASES))
def test_newcomers_are_evaluated_and_leave_no_trace(name: str, settings: Any) -> None:
    changes = {"train": {"momentum": 0.0}, "federation": {"rounds": 2, "held_out": 0.5, "newcomer_epochs": 1}}
    with pytest.raises(Stopped):
        run(settings(name="broken", **changes), CASES[name], StopAfter(1))
    resumed = run(settings(name="broken", **changes), CASES[name], resume=True)
    assert content(resumed) == content(run(settings(name="whole", **changes), CASES[name]))
    newcomers = sample_newcomers(0, 4, 0.5)
    assert set(resumed.reader.evaluations(2)) == newcomers
    assert not newcomers & {client for client, _, _ in resumed.reader.client_states()}
