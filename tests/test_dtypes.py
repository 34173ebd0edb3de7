"""float64 and complex values: summed in float64, or as pairs, and sent in full precision if the codec refuses them."""

import copy
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import Trainer, Weights, assert_same_weights, check_resume, train
from q_adam_life import NUM_STEPS, Life, check_lives, initial_of
from q_adam_life import Trainer as QAdamTrainer
from ranks import run_ranks
from test_ddp import check_runs
from test_decentralized import check_decentralized, check_low_precision
from training import Tower, Wide, build
from training import train as train_hooked

UNEVEN = [0, 1, 1, 0, 1]
ignores_warning = pytest.mark.filterwarnings("ignore:torchbagua. .* in full precision:RuntimeWarning")


@pytest.mark.parametrize(
    ("algorithm", "nodes"),
    [
        (tb.GradientAllReduceAlgorithm(hierarchical=True), UNEVEN),
        (tb.ByteGradAlgorithm(), UNEVEN),
        (tb.ByteGradAlgorithm(), None),
    ],
)
@ignores_warning
def test_gradients(algorithm: tb.Algorithm, nodes: Sequence[int] | None) -> None:
    """complex64 is encoded as pairs of float32; float64 and complex128 are sent in full precision."""
    model = build(Wide)

    def body(group: dist.ProcessGroup) -> Any:
        return train_hooked(group, model, algorithm, nodes=nodes, bucket_cap_mb=0.01)

    runs = run_ranks(len(nodes or range(3)), body)
    check_runs(runs, algorithm, nodes)
    assert runs[0].averaged[0].keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("algorithm", "nodes"),
    [
        (tb.DecentralizedAlgorithm(bucket_cap_mb=0.01), UNEVEN),
        (tb.DecentralizedAlgorithm(True, "shift_one", bucket_cap_mb=0.01), UNEVEN),
        (tb.LowPrecisionDecentralizedAlgorithm(), None),
        (tb.LowPrecisionDecentralizedAlgorithm(), UNEVEN),
    ],
)
@ignores_warning
def test_weights(algorithm: Any, nodes: Sequence[int] | None) -> None:
    """Weights and buffers equal the oracle."""
    model = build(Wide)
    traces = run_ranks(len(nodes or range(3)), lambda group: train(group, model, algorithm, nodes=nodes))
    if isinstance(algorithm, tb.DecentralizedAlgorithm):
        check_decentralized(traces, algorithm.peer_selection_mode, 1, nodes)
    else:
        check_low_precision(traces, 1, nodes)
    assert {"norm.running_var", "running_turn"} <= traces[0].final.keys()


@pytest.mark.parametrize(
    "algorithm", [tb.LowPrecisionDecentralizedAlgorithm(), tb.DiLoCoAlgorithm(2, delay=1)], ids=repr
)
@ignores_warning
def test_averaged_weights_resume(algorithm: tb.Algorithm) -> None:
    model = build(Wide)
    run_ranks(2, lambda group: check_resume(group, model, algorithm, algorithm, 3))


def test_gradients_in_the_warm_up_of_async() -> None:
    """Two ranks, because a sum of two has no order: its buckets differ from DDP's, so gloo's order would differ."""
    model = build(Wide)

    def weights_with(group: dist.ProcessGroup, algorithm: tb.Algorithm) -> Weights:
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm):
            for _ in range(3):
                trainer.step()
            return {name: parameter.detach().clone() for name, parameter in trainer.module.named_parameters()}

    def body(group: dist.ProcessGroup) -> None:
        warm_up = tb.AsyncModelAverageAlgorithm(warmup_steps=4)
        assert_same_weights(
            [weights_with(group, algorithm) for algorithm in (tb.GradientAllReduceAlgorithm(), warm_up)]
        )

    run_ranks(2, body)


@ignores_warning
def test_qadam_steps_float64_in_float64() -> None:
    """Bitwise equal to Adam in the warm-up, then to the oracle with the mean gradient in full precision."""
    nodes = [0, 0, 1]
    model = build(lambda: Tower(dtypes=(torch.float64, torch.float32)))

    def body(group: dist.ProcessGroup) -> Life:
        trainer = QAdamTrainer(group, model, bucket_cap_mb=0.01)
        impl = trainer.hook(nodes)
        for _ in range(NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    lives = run_ranks(3, body)
    check_lives(lives, initial_of(model), nodes)
    assert lives[0].momenta[-1]["layers.0.weight"].dtype == torch.float64


def wrap(
    group: dist.ProcessGroup, model: nn.Module, name: str
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
    if name == "qadam":
        return ddp, tb.QAdamOptimizer(p for p in ddp.parameters() if not p.is_complex())
    return ddp, torch.optim.SGD(ddp.parameters())


@pytest.mark.parametrize("name", ["bytegrad", "low_precision_decentralized", "qadam"])
def test_attach_warns_once_about_uncompressed_parameters(name: str) -> None:
    model = build(Wide)
    # With QAdam, only the parameters of its optimizer: others are in full precision anyway.
    names = ["first.weight", "first.bias", "norm.weight", "norm.bias", *([] if name == "qadam" else ["mix"])]
    num_bytes = sum(model.get_parameter(parameter_name).nbytes for parameter_name in names)

    def body(group: dist.ProcessGroup) -> None:
        ddp, optimizer = wrap(group, model, name)
        with pytest.warns(RuntimeWarning) as warned:
            attachment = tb.attach(ddp, optimizer, name)
        with attachment:  # any further warning is an error
            for _ in range(2):
                ddp(torch.ones(6, 10)).sum().backward()
        (warning,) = warned
        assert warning.filename == __file__
        message = str(warning.message)
        assert f"sends {len(names)} of 8 parameters in full precision, because " in message
        assert f"torch.float64: {', '.join(sorted(names, key=list(dict(model.named_parameters())).index))}, " in message
        assert f"{num_bytes:,} bytes each time" in message

    run_ranks(1, body)


@pytest.mark.parametrize("name", ["bytegrad", "qadam"])
def test_an_error_filter_on_one_rank_makes_all_ranks_raise(name: str) -> None:
    """Filters are per process, but these ranks are threads, so the filter matches a module that only one rank calls."""
    model = build(Wide)
    caller: dict[str, Any] = {"__name__": "strict_rank"}
    exec("def call(function, *arguments): return function(*arguments)", caller)

    def body(group: dist.ProcessGroup) -> str:
        ddp, optimizer = wrap(group, model, name)
        call = caller["call"] if group.rank() == 1 else lambda function, *arguments: function(*arguments)
        with pytest.raises(tb.UncompressedParametersWarning) as raised:
            call(tb.attach, ddp, optimizer, name)
        for algorithm in ("gradient_allreduce", "decentralized", "async"):  # they compress nothing
            call(tb.attach, ddp, optimizer, algorithm).detach()
        call(tb.attach, *wrap(group, build(Tower), name), name if name != "qadam" else "bytegrad").detach()
        return str(raised.value)

    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tb.UncompressedParametersWarning)
        warnings.filterwarnings("error", category=tb.UncompressedParametersWarning, module="strict_rank")
        messages = run_ranks(2, body)
    assert "in full precision, because MinMaxUInt8" in messages[0]
    assert messages[0].endswith("; the filter of rank 1 makes this an error")
    assert messages == [messages[0]] * 2
    assert set(threading.enumerate()) <= before, "no group was opened, and no lane remains"


def test_the_standalone_hook_warns_once() -> None:
    model = build(lambda: Tower(dtypes=(torch.float64,)))

    def body(group: dist.ProcessGroup) -> None:
        with pytest.warns(RuntimeWarning, match=r"ByteGrad.* does not encode torch.float64: parameter 0 of ") as warned:
            train_hooked(group, model, tb.ByteGradAlgorithm(), bucket_cap_mb=0.01)
        assert len(warned) == 1

    run_ranks(1, body)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ["gradient_allreduce", "decentralized"])
def test_other_dtypes_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(2, 1)
        ddp = DistributedDataParallel(module, process_group=group)
        module.register_parameter("odd", nn.Parameter(torch.zeros(3, dtype=dtype)))
        allowed = "float64, float32, bfloat16, float16, complex128 or complex64"
        with pytest.raises(ValueError, match=f"attach: parameter odd must be {allowed}, got {dtype}"):
            tb.attach(ddp, torch.optim.SGD(ddp.parameters()), name)

    run_ranks(1, body)


def test_buckets_refuse_dtypes_that_they_cannot_send() -> None:
    def body(group: dist.ProcessGroup) -> None:
        bagua_group = tb.BaguaProcessGroup(group)
        tensors = [tb.extend.BaguaTensor("weight", torch.zeros(4, dtype=torch.float64))]
        bucket = tb.extend.BaguaBucket("b", tensors, bagua_group, torch.zeros(4, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"must be a codec that encodes torch\.float64, or None .* MinMax"):
            bucket.append_centralized_synchronous_op(compression="minmax_uint8")
        with pytest.raises(ValueError, match=r"flat must be real, with complex numbers as pairs, got torch\.complex64"):
            tb.extend.BaguaBucket("b", tensors, bagua_group, torch.zeros(4, dtype=torch.complex64))

    run_ranks(1, body)
