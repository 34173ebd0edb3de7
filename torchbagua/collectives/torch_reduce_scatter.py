"""torch's own reduce-scatter between CPUs, over private connections."""

from typing import Any

import torch

from torchbagua._torch import reduce_scatter_base
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError, cause_of


def torch_reduce_scatter(
    communicator: Communicator, x_N: torch.Tensor, out_L: torch.Tensor, op: Any, name: str
) -> None:
    """Write the sum or mean of this rank's row of all ranks' `x_N` to `out_L`, bitwise equal to torch's reduce-scatter.

    `ReduceScatter` sums in another order. Observers are not notified.
    """
    try:
        reduce_scatter_base(communicator.torch_group, out_L, x_N, op).wait()
    except CommunicationError:  # the group is closed
        raise
    except RuntimeError as error:
        cause = cause_of(error)
    else:
        return
    # Between CPUs torch reduces around a ring, and does not report on which side of this rank it broke.
    after, before = communicator.rank_after(1), communicator.rank_before(1)
    whom = f" receiving from {communicator.name_of(after)} or sending to {communicator.name_of(before)}"
    raise communicator.failure(f"reduce_scatter of {name}", cause, whom)
