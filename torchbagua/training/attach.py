"""attach: install an algorithm on a module and its optimizers, and remove it again.

Execution order:

1. `check_arguments` (attach_checks.py) checks everything that can fail on one rank alone. `warn_uncompressed` warns of
   parameters that the codec does not encode.
2. `bind` (algorithms/base.py), like `Algorithm.reify`, has ranks compare their settings over the group's store and
   opens private groups.
3. `bind` also creates a `Runner` over these groups. The runner calls `Algorithm.make_impl` and watches the optimizers'
   steps.
4. `Attachment` gives all ranks the same weights if no DDP has done so. `Runner.set_module` creates the buckets of a
   weight algorithm. The buckets of a gradient algorithm are created when DDP first passes them (`gradient_bucket`).
5. `Attachment` installs the step hooks (step_hooks.py). Then it installs DDP's communication hook, `comm_hook` of
   ddp.py; or it disables DDP's communication; or it replaces the collectives of a sharded module
   (fsdp2/communication.py).
6. In a step of a gradient algorithm, DDP passes a bucket to the hook, the lane reduces the bucket, backward waits for
   all buckets, the optimizer steps and commits the algorithm's state, and the `StepClock` ends the step. A weight
   algorithm communicates at the end of the step, in its own buckets.
7. `detach` finishes the communication in flight, removes the hooks of 5, and closes the lane and the groups of 3 and 2.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.algorithms.base import Algorithm, bind
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Observer
from torchbagua.observe.summary import Summary
from torchbagua.training.attach_checks import check_arguments, warn_uncompressed
from torchbagua.training.attachment import Attachment
from torchbagua.training.setup import TrainingSetup


def attach(
    module: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
) -> Attachment:
    """Attach an algorithm, which communicates a module's gradients or weights until you call `detach`. Collective.

    Call it on every rank. Your training loop does not change. `attach` returns a context manager that detaches on exit.

    With a synchronous weight algorithm, all ranks must take the same number of optimizer steps. With a gradient
    algorithm, they must also run the same synchronized backward passes.

    Args:
        module: the module that your loop calls, or a list of modules if one optimizer trains several. A gradient
            algorithm takes a DistributedDataParallel without a
            communication hook. A gradient algorithm that supports sharded modules also takes a module that fully_shard
            has sharded, in whole or in part. A weight algorithm takes any other module too; for a sharded module, see
            `torchbagua.fsdp.attach`. If the module is not a DistributedDataParallel, a weight algorithm first
            broadcasts rank 0's parameters, buffers and optimizer state to all ranks. While a weight algorithm is
            attached, DDP sends neither gradients nor buffers. This also holds for a DDP that wraps the module you pass,
            or a part of it. A list contains no sharded module, and names of parameters begin with the module's position
            in it: "0.weight".
        optimizer: the optimizer of the module's parameters, or a list of optimizers. An optimizer that accelerate or
            Lightning has wrapped is accepted. A step ends when every optimizer has stepped, or was skipped by a
            GradScaler. If the optimizer also has parameters of other modules, a gradient algorithm ignores these, and a
            weight algorithm rejects the optimizer. With a gradient algorithm other than QAdam, the optimizer may have
            copies of the module's parameters in their place, such as float32 masters.
        algorithm: an algorithm, or its registered name.
        process_group: a torch process group, whose ranks are assigned to nodes by host name, or a BaguaProcessGroup,
            which specifies the node of each rank. The default is the module's group, or the world if there is no DDP.
            If the algorithm averages gradients within nodes, DDP's own process group is allowed to be smaller: it
            can consist of the ranks of one node.
        grad_scaler: the GradScaler of your loop. QAdam and error feedback read the loss scale from it. With a
            synchronous weight algorithm, all ranks then skip a step together; with asynchronous averaging, each rank
            skips alone.
        observers: objects that are notified of every phase of communication and of each training step; see
            `torchbagua.observe`.
        timeout: the longest time that the algorithm waits for another rank. The default is the group's timeout. With
            CPU tensors it also bounds FSDP's own collectives. DDP's own collectives, for instance those that broadcast
            buffers, keep the group's timeout. The end of asynchronous averaging is not bounded: it waits for the ranks
            that are still training.

    Raises:
        TypeError, ValueError: an argument is invalid, or ranks disagree on the algorithm, its arguments, the version
            of the package, or the module's parameters.
        KeyError: no algorithm has that name.
        UncompressedParametersWarning: some parameters have a dtype that the codec does not encode, and a warning filter
            on any rank turns this warning into an error. All ranks then raise it. Without such a filter, the warning
            names these parameters, and they are sent in full precision.
        TimeoutError: a rank did not call `attach` in time.
        CommunicationError: a private group could not be opened.
        RuntimeError: the native library exists but cannot be loaded.
    """
    setup = check_arguments(module, optimizer, algorithm, process_group, grad_scaler, observers, timeout)
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
            [*observers, *([] if summary is None else [summary])],  # a duplicate observer is notified once
            timeout,
            rank_invariants=setup.rank_invariants(),
            run_settings=setup.run_settings(),
            refusal=refusal,
        )
    except UncompressedParametersWarning as warning:
        for later_group in setup.groups_opened_later():  # ranks of other meshes would wait there for this rank
            with suppress(UncompressedParametersWarning, TimeoutError):
                BaguaProcessGroup(later_group, timeout=timeout, refusal=str(warning))
        raise
    return Attachment(setup, runner, summary)


def _rank_in_job(group: dist.ProcessGroup | BaguaProcessGroup) -> int:
    """Return this rank's number in the whole job. A group that was built by hand knows only its own rank numbers."""
    torch_group = group.process_group if isinstance(group, BaguaProcessGroup) else group
    try:
        return dist.get_process_group_ranks(torch_group)[torch_group.rank()]
    except KeyError:
        return torch_group.rank()


def _summary_among(
    observers: Sequence[Observer], process_group: dist.ProcessGroup | BaguaProcessGroup | None
) -> Summary | None:
    """Return the Summary for `Attachment.summary`: the user's, or a new one if anything is observed, or None."""
    is_observed = bool(observers) or (isinstance(process_group, BaguaProcessGroup) and process_group.tracer.is_on)
    given = next((observer for observer in observers if isinstance(observer, Summary)), None)
    return given or (Summary() if is_observed else None)
