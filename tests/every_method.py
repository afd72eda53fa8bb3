"""What the contract is tested on: every registered method, every variant on FedVPT, and the hardest future users."""

from __future__ import annotations

from hard_users import HARD_USERS

from fedprompt.core import registry
from fedprompt.core.method import Method
from fedprompt.methods.fedins import FedIns
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.methods.pfedpt import PFedPT

CASES: dict[str, Method] = {
    **{name: cls() for name, cls in registry.methods().items()},
    **{f"fedvpt+{name}": cls(inner=FedVPT(head="shared")) for name, cls in registry.variants().items()},  # type: ignore[call-arg]
    "fedins+ssf": FedIns(form="ssf", pool=6),
    "pfedpt+pixels": PFedPT(form="pixels", border=2),
    **HARD_USERS,
}
