"""Updates that come after their round: they count in a later one, with less weight.

Client i was sent x_s in round s and answers y_i in round t > s, after its deadline: tau = t - s rounds late. Its step is applied to
today's model, as in FedBuff (Nguyen et al., 2022), and its weight decays with its age, as in FedAsync (Xie et al., 2019):

    y_i' = x_t + (y_i - x_s)                                                                   (rebased)
    x_{t+1} = sum_i w_i y_i' / sum_i w_i,    w_i = n_i * lambda^tau_i,    tau_i = 0 in time    (weighted)

lambda is `federation.staleness`, n_i the images of client i (1 with `weighting: uniform`). lambda = 0 is the average of those in
time, lambda = 1 counts a late update in full; lambda^tau falls with every round in between. Sums over images (class sums, counts)
are scaled by lambda^tau as well, so their means stay what they are. Where no client is late, this is the usual average.

Private runs refuse it: what an update may reveal is accounted for in the round it was sampled in.
"""

from __future__ import annotations

from dataclasses import replace

from fedprompt.core.messages import LocalUpdate
from fedprompt.tensors import Tensors


def decay(staleness: float, late: int) -> float:
    """lambda^tau, the share of its weight that an update keeps; 1 for one in time, whatever lambda is."""
    return 1.0 if late == 0 else float(staleness**late)


def rebased(reply: LocalUpdate, now: Tensors) -> LocalUpdate:
    """A late update as a step from the tensors that its client would receive now.

    A tensor that is not like the one it was trained from stays as it is: the guard refuses it by its own rule.
    """
    if not reply.late or reply.started is None:
        return reply
    upload = dict(reply.upload)
    for name, tensor in reply.upload.items():
        before, today = reply.started.get(name), now.get(name)
        if before is None or today is None or not tensor.is_floating_point():
            continue
        if all((each.shape, each.dtype) == (tensor.shape, tensor.dtype) for each in (before, today)):
            upload[name] = tensor + (today - before.to(today.device)).to(tensor.device)
    return replace(reply, upload=upload, started=None)
