"""Algorithms that users write as in Bagua's documentation, on ranks that are threads."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

import torchbagua.compat.bagua as bagua
from ranks import gloo_group, run_ranks
from test_torch_api import NUM_STEPS, steps, weights
from test_torch_api import UNNORMED as MODEL
from torchbagua.compat.bagua.algorithms import Algorithm, AlgorithmImpl, gradient_allreduce
from torchbagua.compat.bagua.bucket import BaguaBucket
from torchbagua.compat.bagua.data_parallel import DistributedDataParallel
from torchbagua.compat.bagua.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from training import Branches, build


class Own(Algorithm):
    """An algorithm that reifies with the function it is given."""

    def __init__(self, make_impl: Callable[[Any], AlgorithmImpl], interval: int = 1) -> None:
        self.make_own_impl = make_impl
        self.interval = interval

    def reify(self, process_group: bagua.BaguaProcessGroup) -> AlgorithmImpl:
        return self.make_own_impl(process_group)


class Mean(AlgorithmImpl):
    """Averages gradients; overrides `init_operations` alone."""

    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)


class Aligned(Mean):
    """Averages gradients; overrides every method. Pairs of suggested lists (or the last list) form aligned buckets."""

    def init_tensors(self, bagua_ddp: BaguaDistributedDataParallel) -> list[torch.Tensor]:
        return [
            parameter.bagua_ensure_grad().ensure_bagua_tensor(
                name,
                bagua_ddp.bagua_module_name,
                getter_closure=lambda parameter: parameter.grad,
                setter_closure=lambda parameter, gradient: setattr(parameter, "grad", gradient),
            )
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]

    def tensors_to_buckets(self, tensors: list[list[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        assert all(tensor.is_bagua_tensor() for group in tensors for tensor in group)
        size = self.process_group.get_global_communicator().nranks()
        pairs = [
            [*first, *(tensors[index + 1] if index + 1 < len(tensors) else [])]
            for index, first in enumerate(tensors)
            if index % 2 == 0
        ]
        buckets = [
            BaguaBucket(pair, flatten=do_flatten, name=str(index), alignment=7 * size)
            for index, pair in enumerate(pairs)
        ]
        assert all(bucket.flattened_tensor().numel() % (7 * size) == 0 for bucket in buckets)
        assert any(bucket.padding_tensor is not None for bucket in buckets)
        return buckets

    def init_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[str, torch.Tensor], None]:
        return lambda name, parameter: parameter.bagua_mark_communication_ready()

    def init_post_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[], None]:
        return lambda: bagua_ddp._bagua_backend.wait_pending_comm_ops()

    def init_post_optimizer_step_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[Any], None]:
        self.stepped: list[torch.optim.Optimizer] = []
        return self.stepped.append


class Broadcast(Mean):
    """Averages gradients with a Python operation that zeroes the mean on all ranks but one, followed by a sum."""

    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
        share = float(self.process_group.get_global_communicator().rank() == 0)

        def scale(name: str) -> None:
            assert name == bucket.name
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(share)

        super().init_operations(bagua_ddp, bucket)
        bucket.append_python_op(scale, group=self.process_group)
        bucket.append_centralized_synchronous_op(average=False, group=self.process_group)


class Gossip(AlgorithmImpl):
    """Averages weights while forward and backward run, as Bagua's decentralized algorithm does."""

    def init_tensors(self, bagua_ddp: BaguaDistributedDataParallel) -> list[torch.Tensor]:
        self.tensors = [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]
        return self.tensors

    def tensors_to_buckets(self, tensors: list[list[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket([tensor for group in tensors for tensor in group], flatten=do_flatten, name="0")]

    def init_forward_pre_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[Any], None]:
        def hook(inputs: Any) -> None:
            for tensor in self.tensors:
                tensor.bagua_mark_communication_ready()

        return hook

    def init_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[str, torch.Tensor], None]:
        return lambda name, parameter: None

    def init_post_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[], None]:
        def hook() -> None:
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            for bucket in bagua_ddp.bagua_buckets:
                bucket._op.copy_back_peer_weight(bucket.backend_bucket)

        return hook

    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: Any) -> None:
        bucket._peer_weight = bucket.flattened_tensor().ensure_bagua_tensor("peer_weight")
        bucket.clear_ops()
        bucket._op = bucket.append_decentralized_synchronous_op(
            peer_weight=bucket._peer_weight, hierarchical=False, peer_selection_mode="all", group=self.process_group
        )


class AfterStep(Gossip):
    """Communicates weights after the optimizers' steps: their mean, or a round of the ring."""

    in_ring = False
    hierarchical = False
    num_steps = 0

    def init_forward_pre_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[Any], None]:
        return lambda inputs: None

    def init_post_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[], None]:
        return lambda: None

    def init_post_optimizer_step_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[Any], None]:
        def hook(optimizer: torch.optim.Optimizer) -> None:
            self.num_steps += 1
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.bagua_mark_communication_ready()
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook

    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: Any) -> None:
        bucket.clear_ops()
        if not self.in_ring:
            bucket.append_centralized_synchronous_op(group=self.process_group)
            return
        bucket._replicas = [bucket.flattened_tensor().ensure_bagua_tensor(name) for name in ("own", "left", "right")]
        bucket.append_low_precision_decentralized_synchronous_op(
            *bucket._replicas, hierarchical=self.hierarchical, compression="MinMaxUInt8", group=self.process_group
        )


class InRing(AfterStep):
    in_ring = True


class InRingOfNodes(InRing):
    """A ring over nodes, which is the mean on a single node."""

    hierarchical = True


class Momentum(Mean):
    """Sends a momentum in 8 bits, as Bagua's QAdam does after its warm-up; the closures access the momentum."""

    def init_tensors(self, bagua_ddp: BaguaDistributedDataParallel) -> list[torch.Tensor]:
        tensors = []
        for name, parameter in bagua_ddp.bagua_build_params():
            parameter._momentum = torch.zeros_like(parameter)  # type: ignore[attr-defined]
            tensors.append(
                parameter.ensure_bagua_tensor(
                    name,
                    bagua_ddp.bagua_module_name,
                    getter_closure=lambda parameter: parameter._momentum,
                    setter_closure=lambda parameter, value: setattr(parameter, "_momentum", value),
                )
            )
        return tensors

    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
        def update_momentum(*_: str) -> None:
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(0.9).add_(tensor.grad, alpha=0.1)

        bucket.append_python_op(update_momentum, group=self.process_group)
        bucket.append_centralized_synchronous_op(
            hierarchical=True, average=True, scattergather=True, compression="MinMaxUInt8", group=self.process_group
        )

    def init_post_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[], None]:
        def hook() -> None:
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            for _, parameter in bagua_ddp.bagua_build_params():
                parameter.grad = parameter._momentum.clone()  # type: ignore[attr-defined]

        return hook


class Stages(Gossip):
    """Gossip for two steps, then the mean of gradients; `need_reset` switches between them."""

    forwards = 0

    @property
    def kind(self) -> type[AlgorithmImpl]:
        return Gossip if self.forwards <= 2 else Mean

    def need_reset(self) -> bool:
        self.forwards += 1
        return self.forwards == 3


def of_kind(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: getattr(self.kind, name)(self, *arguments)


for _method in ("init_tensors", "tensors_to_buckets", "init_operations"):
    setattr(Stages, _method, of_kind(_method))
for _when in ("forward_pre", "backward", "post_backward"):
    setattr(Stages, f"init_{_when}_hook", of_kind(f"init_{_when}_hook"))


def attach_own(
    group: dist.ProcessGroup, impl: Any, *, several: bool = False, fused: bool = False, **options: Any
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Return a copy of the model with an attached algorithm, and its optimizers: one, or one for each layer."""
    module = copy.deepcopy(MODEL)
    parts = [module[0], module[2]] if several else [module]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, fused=fused) for part in parts]
    module.with_bagua(optimizers, Own(impl), bagua.from_torch_group(group), **options)
    return module, optimizers


def run_own(impl: Any, *, size: int = 2, num_buckets: int = 1, **options: Any) -> list[list[torch.Tensor]]:
    """Return each rank's weights before and after `detach`."""

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        module, optimizers = attach_own(group, impl, **options)
        assert isinstance(module.bagua_algorithm, AlgorithmImpl)
        assert all(isinstance(bucket, BaguaBucket) for bucket in module.bagua_buckets)
        assert len(module.bagua_buckets) == num_buckets
        steps(group.rank(), module, *optimizers)
        before = weights(module)
        module.bagua_ddp.attachment.detach()
        return [before, weights(module)]

    return run_ranks(size, body)


@functools.cache
def weights_with_ddp() -> torch.Tensor:
    def body(group: dist.ProcessGroup) -> torch.Tensor:
        module = copy.deepcopy(MODEL)
        ddp = parallel.DistributedDataParallel(module, process_group=group)
        steps(group.rank(), ddp, torch.optim.SGD(module.parameters(), lr=0.1))
        return weights(module)

    return run_ranks(2, body)[0]


@pytest.mark.parametrize(
    ("impl", "num_buckets", "do_flatten"),
    [(Mean, 4, False), (Aligned, 2, True), (Aligned, 2, False), (Broadcast, 4, True), (Broadcast, 4, False)],
)
def test_gradients(
    impl: type[AlgorithmImpl], num_buckets: int, do_flatten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks the mean is exact, so the weights are equal to DDP's."""
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "135")  # a weight of 132 bytes, without the bias of 4
    for before, after in run_own(impl, do_flatten=do_flatten, num_buckets=num_buckets):
        assert torch.equal(before, weights_with_ddp())
        assert torch.equal(after, weights_with_ddp())


@pytest.mark.parametrize("do_flatten", [True, False])
def test_gradients_are_views_of_the_buckets_with_do_flatten(do_flatten: bool) -> None:
    """Also after zero_grad has set gradients to None."""

    def body(group: dist.ProcessGroup) -> bool:
        module, optimizers = attach_own(group, Mean, do_flatten=do_flatten)
        steps(group.rank(), module, *optimizers, num_steps=2)
        (bucket,) = module.bagua_buckets
        assert bucket.bytes() == 4 * weights(module).numel()
        assert torch.equal(bucket.flattened_tensor(), torch.cat([tensor.grad.flatten() for tensor in bucket.tensors]))
        is_flat = bool(bucket.check_flatten())
        module.bagua_ddp.attachment.detach()
        return is_flat

    assert run_ranks(2, body) == [do_flatten] * 2


@pytest.mark.parametrize(("impl", "do_flatten"), [(Gossip, True), (Gossip, False), (InRing, True)])
def test_weights_are_averaged_at_the_end(impl: type[AlgorithmImpl], do_flatten: bool) -> None:
    before, after = zip(*run_own(impl, size=3, do_flatten=do_flatten), strict=True)
    assert all(torch.equal(tensor, after[0]) for tensor in after)
    assert not any(torch.equal(tensor, before[0]) for tensor in before[1:])
    torch.testing.assert_close(after[0], torch.stack(before).mean(0))


def test_hierarchical_ring_on_a_single_node_is_the_mean() -> None:
    ring, mean = run_own(InRingOfNodes, size=3), run_own(AfterStep, size=3)
    for found, expected in zip(ring, mean, strict=True):
        assert all(map(torch.equal, found, expected))
        assert torch.equal(found[0], ring[0][0]), "equal on all ranks before detach"


def test_ranks_skip_steps_together_and_averaged_weights_is_temporary() -> None:
    """A fused optimizer is called after an overflow too, and then skips its step."""

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        module, (optimizer,) = attach_own(group, InRing, fused=True, grad_scaler=scaler)
        runner = module.bagua_ddp.attachment.runner
        assert (runner.name, runner.ended_by) == ("InRing", "model.bagua_ddp.attachment.detach()"), "as users know it"
        assert not runner.needs_grad_scaler
        for size in (1.0, float("inf") if group.rank() == 1 else 1.0):
            optimizer.zero_grad()
            scaler.scale(size * module(torch.randn(6, 10)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found = [weights(module)]
        with module.bagua_ddp.attachment.averaged_weights():
            found.append(weights(module))
            own = module.bagua_ddp.attachment.rank_state_dict()["module"]
            assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in own.values()]), found[0])
        module.bagua_ddp.attachment.detach()
        assert module.bagua_algorithm.num_steps == 1
        return [*found, weights(module)]

    (own, mean, last), (peer_own, peer_mean, _) = run_ranks(2, body)
    assert not torch.equal(own, peer_own)
    assert torch.equal(mean, peer_mean)
    assert torch.equal(mean, last)


def test_gossip_is_d_psgd() -> None:
    """A step yields the mean of the weights before it, minus each rank's update by the gradient at its own weights."""
    replicas = [copy.deepcopy(MODEL) for _ in range(2)]
    data = [torch.Generator().manual_seed(1000 + rank) for rank in range(2)]
    for _ in range(NUM_STEPS):
        for replica, generator in zip(replicas, data, strict=True):
            replica.zero_grad()
            replica(torch.randn(6, 10, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = (parameters[0] + parameters[1]) / 2
                for parameter in parameters:
                    parameter.copy_(mean).sub_(parameter.grad, alpha=0.1)
    for rank, (before, _) in enumerate(run_own(Gossip)):
        torch.testing.assert_close(before, weights(replicas[rank]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("do_flatten", [True, False])
def test_closures_that_access_a_momentum(do_flatten: bool) -> None:
    (first, _), (second, _) = run_own(Momentum, do_flatten=do_flatten)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert not torch.equal(first, weights(MODEL))


def test_several_optimizers() -> None:
    """The hook is called after each step of each optimizer."""
    assert all(torch.equal(before, weights_with_ddp()) for before, _ in run_own(Mean, several=True))
    (first, _), (second, _) = run_own(AfterStep, several=True)
    assert torch.equal(first, second)

    def body(group: dist.ProcessGroup) -> None:
        module, (first, second) = attach_own(group, Aligned, several=True)
        steps(group.rank(), module, first, second, num_steps=1)
        second.step()
        assert module.bagua_algorithm.stepped == [first, second, second]
        assert module.bagua_ddp.bagua_train_step_counter == 1
        module.bagua_ddp.attachment.detach()

    run_ranks(2, body)


def test_need_reset_restarts_from_equal_weights() -> None:
    """Ranks differ after gossip, and the mean of gradients alone would not make them equal."""
    (first, _), (second, _) = run_own(Stages)
    assert torch.equal(first, second)


def test_evaluation_is_not_a_step() -> None:
    def body(group: dist.ProcessGroup) -> int:
        module, optimizers = attach_own(group, Gossip)
        for _ in range(2):
            module.eval()(torch.randn(2, 10))
            with torch.no_grad():
                module.train()(torch.randn(2, 10))
            steps(group.rank(), module, *optimizers, num_steps=1)
        module.bagua_ddp.attachment.detach()
        return int(module.bagua_ddp.bagua_train_step_counter)

    assert run_ranks(2, body) == [2, 2]


def test_a_separate_group_for_an_operation() -> None:
    """The impl uses a group besides the algorithm's, as Bagua's asynchronous impl does."""

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        store = dist.PrefixStore("other", group.get_group_store())
        separate = bagua.from_torch_group(gloo_group(store, group.rank(), group.size()))

        class Impl(Mean):
            def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
                bucket.append_centralized_synchronous_op(group=separate)

        module, optimizers = attach_own(group, Impl)
        steps(group.rank(), module, *optimizers)
        module.bagua_ddp.attachment.detach()
        return weights(module)

    assert all(torch.equal(found, weights_with_ddp()) for found in run_ranks(2, body))


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_parameters_without_a_gradient(find_unused_parameters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks leave out different parameters, and their buckets become ready in different orders."""
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "700")
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        module = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        ddp = DistributedDataParallel(
            module,
            process_group=group,
            optimizers=[optimizer],
            algorithm=Own(Mean),
            find_unused_parameters=find_unused_parameters,
        )
        for step in range(3):
            optimizer.zero_grad()
            ddp(torch.randn(4, 10), step + group.rank()).sum().backward()
            optimizer.step()
        ddp.inner.attachment.detach()
        return weights(module)

    if not find_unused_parameters:
        with pytest.raises(RuntimeError, match=r"bucket 0 has not run: .*never\.weight.* not ready"):
            run_ranks(2, body)
        return
    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_no_sync() -> None:
    """Gradients that two micro-batches accumulate are averaged once, as with DDP, by any algorithm."""
    runs: list[str] = []

    class Counted(Mean):
        def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
            super().init_operations(bagua_ddp, bucket)
            bucket.append_python_op(runs.append)

    def train(group: dist.ProcessGroup, algorithm: Any) -> torch.Tensor:
        module = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if algorithm is None:
            ddp = parallel.DistributedDataParallel(module, process_group=group)
        else:
            ddp = DistributedDataParallel(module, process_group=group, optimizers=[optimizer], algorithm=algorithm)
        data = torch.Generator().manual_seed(group.rank())
        for _ in range(2):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(6, 10, generator=data)).square().sum().backward()
            ddp(torch.randn(6, 10, generator=data)).square().sum().backward()
            optimizer.step()
        if algorithm is not None:
            ddp.inner.attachment.detach()
        return weights(module)

    algorithms = (Own(Counted), gradient_allreduce.GradientAllReduceAlgorithm(), None)
    for own, of_package, expected in run_ranks(2, lambda group: [train(group, each) for each in algorithms]):
        assert torch.equal(own, expected)
        assert torch.equal(of_package, expected)
    assert runs == ["0"] * 2 * 2, "once in each step of each rank"


class Twice(Mean):
    def init_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[str, torch.Tensor], None]:
        def hook(name: str, parameter: torch.Tensor) -> None:
            parameter.bagua_mark_communication_ready()
            parameter.bagua_mark_communication_ready()

        return hook


class Raises(Mean):
    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
        def fail(name: str) -> None:
            raise ArithmeticError("as it was told to")

        bucket.append_python_op(fail)


class TooEarly(Mean):
    def tensors_to_buckets(self, tensors: list[list[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        buckets = super().tensors_to_buckets(tensors, do_flatten)
        buckets[0].append_centralized_synchronous_op()
        return buckets


@pytest.mark.parametrize(
    ("impl", "error", "message"),
    [
        (Twice, RuntimeError, r"2\.bias was marked ready twice, but bucket 0 has not run in between: .* not ready"),
        (Raises, RuntimeError, r"fail on bucket 0 failed on rank \d: ArithmeticError: as it was told to"),
        (TooEarly, RuntimeError, "bucket 0 has no algorithm yet: append operations in init_operations"),
        (
            lambda group: object(),
            TypeError,
            r"Own\.reify must return an AlgorithmImpl of torchbagua\.compat\.bagua",
        ),
    ],
)
def test_errors_name_the_cause(impl: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_own(impl)


def test_ranks_that_disagree_raise() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.with_bagua([optimizer], Own(Mean, interval=1 + group.rank()), group)

    with pytest.raises(ValueError, match="argument interval"):
        run_ranks(2, body)


def test_tensors() -> None:
    tensor = torch.ones(2, 2)
    assert not tensor.is_bagua_tensor()
    with pytest.raises(AttributeError, match=r"a tensor of shape \[2, 2\] is not a Bagua tensor"):
        _ = tensor.bagua_tensor_name
    with pytest.raises(ValueError, match="setter_closure needs a getter_closure"):
        tensor.ensure_bagua_tensor("x", setter_closure=lambda tensor, value: None)
    assert tensor.ensure_bagua_tensor("x", "m") is tensor
    assert [tensor.is_bagua_tensor(), tensor.bagua_tensor_name, tensor.bagua_module_name] == [True, "x", "m"]
    assert tensor.bagua_getter_closure() is tensor
    with pytest.raises(TypeError, match="x has no setter_closure"):
        tensor.bagua_setter_closure(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="x is in no bucket; return it in a bucket"):
        tensor.bagua_mark_communication_ready()
    flat = torch.ones(3).to_bagua_tensor("y")
    storage = torch.arange(8.0)
    flat.bagua_set_storage(storage.untyped_storage(), 2)
    assert flat.tolist() == [2.0, 3.0, 4.0]
    assert not copy.deepcopy(tensor).is_bagua_tensor()
    parameter = nn.Parameter(torch.ones(2))
    parameter.ensure_bagua_tensor("z", getter_closure=lambda parameter: parameter.grad)
    with pytest.raises(RuntimeError, match="getter_closure of z must return a tensor, got None; does it have"):
        parameter.bagua_getter_closure()
    with pytest.raises(ValueError, match="tensors must be at least one, all of one module, dtype and device"):
        BaguaBucket([tensor, torch.ones(2).double().ensure_bagua_tensor("w", "m")], name="0", flatten=True)
