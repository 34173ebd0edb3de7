"""attach: put an algorithm to work on a module and its optimizer, and take it off again.

The whole order:

1. `attach` checks what can fail on one rank alone.
2. `Algorithm.reify` checks the rest of it, has ranks compare over their group's store what must agree, and opens
   private groups.
3. Within that, `Algorithm.make_impl` binds the algorithm to them, and the impl watches the optimizers' steps.
4. `Attachment` gives ranks the same weights where no DDP has, and `AlgorithmImpl.set_module` makes the buckets of a
   weight algorithm; a gradient algorithm's are made when DDP first hands them over (`gradient_bucket`).
5. It installs the hooks: step hooks (step_hooks.py), then DDP's one hook, which ddp.py has call comm_hook.py, or DDP's
   silence, or what a sharded module communicates (fsdp/communication.py).
6. A step of a gradient algorithm: DDP hands a bucket to the hook, the lane runs it, backward waits for all, the
   optimizer steps and commits what the algorithm keeps, the `StepClock` ends the step. A weight algorithm
   communicates at that end, in buckets of its own.
7. `detach` finishes what is in flight, removes the hooks of 5, and closes the lane and the groups of 3 and 2.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua.algorithms.base import Algorithm, init_for
from torchbagua.codecs.base import Compressor
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Observer, check_observers
from torchbagua.observe.summary import Summary
from torchbagua.runtime.optimizer_steps import unwrap
from torchbagua.runtime.shards import reshard, sharded_parts
from torchbagua.training.attachment import Attachment
from torchbagua.training.checks import (
    check_algorithm,
    check_ddp_arguments,
    check_detached,
    check_kind,
    check_module,
    check_optimizers,
    check_replicate_group,
    check_same_ranks,
    warn_of_closures,
)
from torchbagua.training.setup import TrainingSetup, ddps_of
from torchbagua.training.sharded.gather import check_quantize_weights


def attach(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    process_group: BaguaProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
    strict: bool = False,
    ddp_arguments: Mapping[str, Any] | None = None,
    replicate_group: dist.ProcessGroup | None = None,
    quantize_weights: str | Compressor | None = None,
) -> Attachment:
    """Put an algorithm in charge of what a module communicates, until you detach it. Collective.

    Your training loop stays as it is. What is returned is a context manager: leaving it detaches.

    With `DecentralizedAlgorithm` and `LowPrecisionDecentralizedAlgorithm`, all ranks must make the same number of
    backward passes through the module in each step.

    Args:
        module: for an algorithm that averages gradients, a DistributedDataParallel without a communication hook.
            `ByteGradAlgorithm` and `CompressedAllReduceAlgorithm` also take a module on which fully_shard was called,
            or in which there are such parts. An algorithm that averages weights takes any other module, and a sharded
            one with a `replicate_group`. If it is not a DistributedDataParallel, all ranks first get rank 0's
            parameters, buffers and optimizer state. While such an algorithm is attached, DDP sends neither gradients
            nor buffers, also if it is around the module.
        optimizer: the optimizer of the module's parameters, or a list of them. What accelerate or Lightning have
            wrapped is taken too. A step ends when each of them has stepped, or was skipped by a GradScaler. Parameters
            of other modules are left alone; an algorithm that averages weights takes no optimizer that has some.
        algorithm: an algorithm, or its registered name.
        process_group: give it to say which rank is on which node. By default it is the module's group, or the world
            where there is no DDP, and nodes are told apart by host names. With `DiLoCoAlgorithm`, DDP may be over the
            ranks of a node of this group.
        grad_scaler: the GradScaler of your loop. QAdam and error feedback read the loss scale from it. With the two
            decentralized algorithms, all ranks then skip a step together; with asynchronous averaging, each rank skips
            alone.
        observers: are told of every phase of communication and of each training step; see `torchbagua.observe`.
        timeout: the longest that the algorithm waits for another rank; by default that of the group. Between CPUs it
            bounds what FSDP itself sends too. What DDP itself sends, buffers for instance, keeps the group's, and so
            does the making of one with `ddp_arguments`. The end of asynchronous averaging is not bounded: it waits for
            the ranks that are still training.
        strict: raise ValueError if parameters cannot be compressed, float64 ones for instance. By default they travel
            in full precision, and a RuntimeWarning names them.
        ddp_arguments: keyword arguments of DistributedDataParallel, for a module without one. An algorithm that
            averages gradients then makes one of the module, with these; `{}` takes DDP's defaults. You go on calling
            the module itself. An algorithm that averages weights needs none and makes none.
        replicate_group: for a module on which fully_shard was called with a mesh of one dimension, while several such
            meshes train copies of it: the torch group of the ranks that hold the same shards as this one. They first
            get the parameters and buffers of the first of them. Then gradients are averaged over them too, or, by an
            algorithm that averages weights, which needs it for such a module, each rank's shards.
        quantize_weights: for a module on which fully_shard was called: the codec in whose bytes ranks gather the
            weights, "minmax_uint8" for instance, by name or a Compressor that needs no error feedback. Forward and
            backward then compute with the decoded weights, which are the same on all ranks (qwZ of ZeRO++, Wang et al.,
            arXiv 2306.10209). The optimizer keeps its shards in full precision. By default weights are gathered in full
            precision too.

    Raises:
        TypeError, ValueError: an argument does not fit, or ranks disagree in the algorithm, its arguments, the version
            of the package, or the module's parameters.
        KeyError: no algorithm has that name.
        TimeoutError: a rank did not call it in time.
        CommunicationError: a private group could not be opened.
        RuntimeError: the native library exists and cannot be loaded.
    """
    # Whatever can fail on one rank alone comes before reify, the first collective: the others would wait for this rank.
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"attach: module must be a torch.nn.Module, got {type(module).__name__}")
    reshard(sharded_parts(module).values())  # an evaluation may have left parameters gathered, and the module's own
    given = optimizer if isinstance(optimizer, Sequence) and not isinstance(optimizer, str) else [optimizer]
    optimizers = [unwrap(one) for one in given]
    check_module(module)
    check_optimizers(optimizers, module)
    algorithm = init_for(algorithm, optimizers)
    check_algorithm("attach", algorithm)
    if process_group is not None and not isinstance(process_group, BaguaProcessGroup):
        raise TypeError(f"attach: process_group must be a BaguaProcessGroup, got {type(process_group).__name__}")
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise TypeError(f"attach: grad_scaler must be a torch.amp.GradScaler, got {type(grad_scaler).__name__}")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"attach: timeout must be a datetime.timedelta, got {timeout!r}")
    if ddp_arguments is not None:
        check_ddp_arguments(module, ddp_arguments)
    if not isinstance(strict, bool):
        raise TypeError(f"attach: strict must be True or False, got {strict!r}")
    check_replicate_group(module, replicate_group)
    quantize_weights = check_quantize_weights(module, quantize_weights, algorithm)
    check_detached(module)
    ddps = ddps_of(module)
    within_nodes = algorithm.averages_gradients_within_nodes
    setup = TrainingSetup(module, ddps, optimizers, grad_scaler, replicate_group)
    # None: an own algorithm, asked again once the impl is there. Where a DDP is to be made, that is not there yet.
    if algorithm.averages_weights or (algorithm.averages_weights is False and ddp_arguments is None):
        check_kind(algorithm, setup, averages_weights=algorithm.averages_weights)
    own_group = partial(setup.process_group, averages_weights=algorithm.averages_weights)
    if process_group is not None:
        with_groups = [ddp.process_group for ddp in ddps if within_nodes or ddp is module]
        for own in [own_group()] if setup.is_sharded else with_groups:
            check_same_ranks(own, process_group, or_node=within_nodes)
    warn_of_closures(optimizers)
    check_observers("attach", observers)  # reify checks again, for those who call it alone: optimizers too
    summary = _summary_among(observers, process_group)
    impl = algorithm.reify(
        process_group or own_group(),
        optimizer=optimizers,
        observers=[*observers, *([] if summary is None else [summary])],  # the same one twice hears once
        timeout=timeout,
        must_agree={
            **setup.must_agree(),
            "the shard that it holds": None if algorithm.averages_weights is False else setup.shard,
            "attach's argument strict": strict,
            "attach's argument ddp_arguments": _what_must_agree(ddp_arguments),
            "attach's argument quantize_weights": repr(quantize_weights),
        },
        run_settings=setup.run_settings(),
    )
    return Attachment(
        setup,
        algorithm,
        impl,
        summary,
        strict=strict,
        ddp_arguments=ddp_arguments,
        quantize_weights=quantize_weights,
    )


def _what_must_agree(ddp_arguments: Mapping[str, Any] | None) -> str | None:
    """Return all but the devices, which are each rank's own."""
    if ddp_arguments is None:
        return None
    return repr({name: ddp_arguments[name] for name in sorted(ddp_arguments.keys() - {"device_ids", "output_device"})})


def _summary_among(observers: Sequence[Observer], process_group: BaguaProcessGroup | None) -> Summary | None:
    """Return what `Attachment.summary` returns: the user's, or one of our own where anything is observed, or None."""
    is_observed = bool(observers) or (process_group is not None and process_group.tracer.is_on)
    return next((one for one in observers if isinstance(one, Summary)), Summary() if is_observed else None)
