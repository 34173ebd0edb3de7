"""attach for sharded modules: `torchbagua.attach` with two more arguments."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from torchbagua.algorithms.base import Algorithm
from torchbagua.codecs.base import Compressor
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Observer
from torchbagua.training.attach import Attachment, install
from torchbagua.training.checks import check_arguments
from torchbagua.training.fsdp2.options import Sharding


def attach(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    replicate_group: dist.ProcessGroup | None = None,
    quantize_weights: str | Compressor | None = None,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
) -> Attachment:
    """Attach an algorithm to a module on which fully_shard was called: `torchbagua.attach` with two more arguments.

    Collective among the ranks of all meshes.

    Args:
        module, optimizer, algorithm, process_group, grad_scaler, observers, timeout: see `torchbagua.attach`.
        replicate_group: the torch group of the ranks that hold the same shards as this rank, if several
            one-dimensional meshes train copies of the module. All ranks of this group first get the parameters and
            buffers of its first rank. A gradient algorithm then averages gradients over this group too. A weight
            algorithm needs this group, and averages each rank's shards over it.
        quantize_weights: the codec with which ranks gather the weights: its name, see `torchbagua.codecs`, or a
            Compressor that needs no error feedback. Forward and backward then compute with the decoded weights, which
            are the same on all ranks (qwZ of ZeRO++, Wang et al., arXiv 2306.10209). The optimizer keeps its shards in
            full precision. By default weights are gathered in full precision too.

    Raises:
        The errors of `torchbagua.attach`, and ValueError if one of the two arguments is given although fully_shard was
        called on no part of the module.
    """
    sharding = Sharding(replicate_group, quantize_weights)
    setup = check_arguments(module, optimizer, algorithm, process_group, grad_scaler, observers, timeout, sharding)
    return install(setup, process_group, observers, timeout)
