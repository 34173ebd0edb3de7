"""attach: put an algorithm to work on a module and its optimizer, and take it off again.

Execution order:

1. `check_arguments` (attach_checks.py) checks what can fail on one rank alone, and `warn_uncompressed` warns of
   parameters that the codec does not encode.
2. `bind` (algorithms/binding.py), as `Algorithm.reify`, has ranks compare over their group's store what must agree, and
   opens private groups.
3. Within that, a `Runner` is made over these groups. It calls `Algorithm.make_impl`, and watches the optimizers' steps.
4. `Attachment` gives ranks the same weights where no DDP has, and `Runner.set_module` makes the buckets of a
   weight algorithm; a gradient algorithm's are made when DDP first hands them over (`gradient_bucket`).
5. It installs the hooks: step hooks (step_hooks.py), then DDP's one hook, which ddp.py has call comm_hook.py, or DDP's
   silence, or what a sharded module communicates (fsdp2/communication.py).
6. A step of a gradient algorithm: DDP hands a bucket to the hook, the lane runs it, backward waits for all, the
   optimizer steps and commits what the algorithm keeps, the `StepClock` ends the step. A weight algorithm
   communicates at that end, in buckets of its own.
7. `detach` finishes what is in flight, removes the hooks of 5, and closes the lane and the groups of 3 and 2.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.algorithms.base import Algorithm
from torchbagua.algorithms.binding import bind
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Observer
from torchbagua.observe.summary import Summary
from torchbagua.training.attach_checks import check_arguments, warn_uncompressed
from torchbagua.training.attachment import Attachment
from torchbagua.training.fsdp2.options import Sharding
from torchbagua.training.setup import TrainingSetup


def attach(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
) -> Attachment:
    """Put an algorithm in charge of what a module communicates, until you detach it. Collective.

    Your training loop stays as it is. It returns a context manager that detaches on exit.

    With a decentralized algorithm, all ranks must make the same number of backward passes through the module in each
    step.

    Args:
        module: for an algorithm that averages gradients, a DistributedDataParallel without a communication hook; if the
            algorithm takes sharded modules, also a module on which fully_shard was called, or parts of which. An
            algorithm that averages weights takes any other module; for a sharded one, see `torchbagua.fsdp.attach`. If
            the module is not a DistributedDataParallel, all ranks first get rank 0's parameters, buffers and optimizer
            state. While such an algorithm is attached, DDP sends neither gradients nor buffers, also if it wraps the
            module.
        optimizer: the optimizer of the module's parameters, or a list of them. An optimizer that accelerate or
            Lightning have wrapped is taken too. A step ends when each of them has stepped, or was skipped by a
            GradScaler. Parameters of other modules are left alone; an algorithm that averages weights takes no
            optimizer that has some.
        algorithm: an algorithm, or its registered name.
        process_group: a torch group, whose nodes are told apart by host names, or a BaguaProcessGroup, which says which
            rank is on which node. By default it is the module's group, or the world if there is no DDP. If the
            algorithm averages gradients within nodes, DDP may be over the ranks of a node of this group.
        grad_scaler: the GradScaler of your loop. QAdam and error feedback read the loss scale from it. With a
            decentralized algorithm, all ranks then skip a step together; with asynchronous averaging, each rank skips
            alone.
        observers: are notified of every phase of communication and of each training step; see `torchbagua.observe`.
        timeout: the longest that the algorithm waits for another rank; by default that of the group. Between CPUs it
            bounds what FSDP itself sends too. What DDP itself sends, buffers for instance, keeps the group's timeout.
            The end of asynchronous averaging is not bounded: it waits for the ranks that are still training.

    Raises:
        TypeError, ValueError: an argument does not fit, or ranks disagree in the algorithm, its arguments, the version
            of the package, or the module's parameters.
        KeyError: no algorithm has that name.
        UncompressedParametersWarning: a filter on some rank makes this warning an error, and parameters have a dtype
            that the codec does not encode. All ranks raise it. By default it is a warning that names them, and they
            are sent in full precision.
        TimeoutError: a rank did not call it in time.
        CommunicationError: a private group could not be opened.
        RuntimeError: the native library exists and cannot be loaded.
    """
    setup = check_arguments(module, optimizer, algorithm, process_group, grad_scaler, observers, timeout, Sharding())
    return install(setup, process_group, observers, timeout)


def install(
    setup: TrainingSetup,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None,
    observers: Sequence[Observer],
    timeout: timedelta | None,
) -> Attachment:
    """Attach the algorithm of `setup` over `process_group`, or the module's own. Collective; see `attach`."""
    summary = _summary_among(observers, process_group)
    group = process_group or setup.process_group()
    refusal = warn_uncompressed(setup)
    if refusal is not None:
        refusal += f"; the filter of rank {_rank_in_job(group)} makes this an error"
    try:
        runner = bind(
            setup.algorithm,
            group,
            setup.optimizers,
            [*observers, *([] if summary is None else [summary])],  # the same one twice is notified once
            timeout,
            must_agree=setup.must_agree(),
            run_settings=setup.run_settings(),
            refusal=refusal,
        )
    except UncompressedParametersWarning as warning:
        for later_group in setup.groups_opened_later():  # ranks of other meshes would wait there for this one
            with suppress(UncompressedParametersWarning, TimeoutError):
                BaguaProcessGroup(later_group, timeout=timeout, refusal=str(warning))
        raise
    return Attachment(setup, runner, summary)


def _rank_in_job(group: dist.ProcessGroup | BaguaProcessGroup) -> int:
    """Return this rank's number in the whole job; a group that was made by hand knows only its own numbers."""
    torch_group = group.process_group if isinstance(group, BaguaProcessGroup) else group
    try:
        return dist.get_process_group_ranks(torch_group)[torch_group.rank()]
    except KeyError:
        return torch_group.rank()


def _summary_among(
    observers: Sequence[Observer], process_group: dist.ProcessGroup | BaguaProcessGroup | None
) -> Summary | None:
    """Return what `Attachment.summary` returns: the user's, or one of our own where anything is observed, or None."""
    is_observed = bool(observers) or (isinstance(process_group, BaguaProcessGroup) and process_group.tracer.is_on)
    given = next((observer for observer in observers if isinstance(observer, Summary)), None)
    return given or (Summary() if is_observed else None)
