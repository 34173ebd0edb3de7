"""When each method of an impl is called in a training step, recorded by an algorithm that logs the calls."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchbagua as tb
from ranks import run_ranks
from training import build


@dataclass(frozen=True)
class LoggingAlgorithm(tb.Algorithm):
    """Plain averaging that logs the calls of each method of the interface."""

    def make_impl(self, runner: tb.extend.Runner) -> "LoggingImpl":
        return LoggingImpl(runner)


class LoggingImpl(tb.AlgorithmImpl):
    def __init__(self, runner: tb.extend.Runner) -> None:
        super().__init__(runner)
        self.log: list[str] = []
        self.resets = 0

    def need_reset(self) -> bool:
        self.log.append("need_reset")
        self.resets += 1
        return self.resets == 4

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        assert module is not None
        names = [tensor.name for tensor in bucket.tensors]
        assert set(names) <= {name for name, _ in module.named_parameters()}
        self.log.append("init_operations")
        bucket.append_centralized_synchronous_op()

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None]:
        return lambda inputs: self.log.append("forward")

    def init_backward_hook(self, module: torch.nn.Module) -> Callable[[str, torch.Tensor], None]:
        return lambda name, parameter: self.log.append(name)

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return lambda: self.log.append("backward end")

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        return lambda optimizer: self.log.append(type(optimizer).__name__)

    def state_dict(self) -> dict[str, Any]:
        return {"resets": self.resets}

    def load_state_dict(self, state: Any) -> None:
        self.resets = state["resets"]


def test_every_method_is_called_at_the_right_time() -> None:
    model = build(lambda: torch.nn.Linear(10, 1))

    def body(group: dist.ProcessGroup) -> list[str]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, LoggingAlgorithm()) as attachment:
            for _ in range(5):
                ddp(torch.ones(2, 10)).sum().backward()
                optimizer.step()
            ddp.eval()(torch.ones(2, 10))
            ddp.train()
            with torch.no_grad():
                ddp(torch.ones(2, 10))
            assert attachment.state_dict()["impl"] == {"resets": 5}
        ddp(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        impl = attachment.impl
        assert isinstance(impl, LoggingImpl)
        return impl.log

    for log in run_ranks(2, body):
        steps = [step.split() for step in " ".join(log).replace("forward", "|forward").split("|")[1:]]
        every_step = {"forward", "need_reset", "weight", "bias", "backward", "end", "SGD"}
        assert [set(step) - {"init_operations"} for step in steps] == [every_step] * 5
        assert all(step[0] == "forward" and step[-3:] == ["backward", "end", "SGD"] for step in steps)
        # The bucket is new; DDP rebuilds its buckets; no change; need_reset returned True; no change.
        assert ["init_operations" in step for step in steps] == [True, True, False, True, False]


def test_backward_end_is_called_once_with_a_reentrant_checkpoint() -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=True)
            return {"y": self.last(x), "z": x.sum()}

    model = build(Checkpointed)

    def body(group: dist.ProcessGroup) -> list[str]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, LoggingAlgorithm()) as attachment:
            for _ in range(2):
                out = ddp(torch.ones(2, 4, requires_grad=True))
                (out["y"].sum() + out["z"]).backward()
        assert isinstance(attachment.impl, LoggingImpl)
        return attachment.impl.log

    for log in run_ranks(2, body):
        assert log.count("backward end") == 2
        assert log[-1] == "backward end"


def test_ignored_parameters_get_no_hook_and_all_optimizers_define_a_step() -> None:
    """DDP's parameters_to_ignore get no hook; a step ends when both optimizers have stepped, with the later of them."""

    def body(group: dist.ProcessGroup) -> list[str]:
        module = torch.nn.Linear(10, 1)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
        ddp = DistributedDataParallel(module, process_group=group)
        optimizers = [torch.optim.SGD([module.weight], lr=0.1), torch.optim.Adam([module.bias])]
        with tb.attach(ddp, optimizers, LoggingAlgorithm()) as attachment:
            for order in (optimizers, optimizers[::-1]):
                ddp(torch.ones(2, 10)).sum().backward()
                for optimizer in order:
                    optimizer.step()
        assert isinstance(attachment.impl, LoggingImpl)
        return attachment.impl.log

    for log in run_ranks(1, body):
        assert "weight" in log
        assert "bias" not in log
        assert [entry for entry in log if entry in ("SGD", "Adam")] == ["Adam", "SGD"]
