"""Multi-node DiLoCo: every step averages gradients within a node, and rounds run between nodes."""

import copy
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import Normed, Trace, Trainer, Weights, assert_same_weights, is_buffer, weights_of
from diloco_oracle import check_rounds, fragments_of
from ranks import TIMEOUT, gloo_group, leave_by_exception, run_ranks
from torchbagua.observe import Recorder
from training import build

H = 4
NODES = {"2 x 2": [0, 0, 1, 1], "uneven": [0, 1, 1, 0, 1], "2 x 4": [0, 0, 0, 0, 1, 1, 1, 1]}
WAYS = ["DDP of all ranks", "DDP of a node"]


class NodeTrainer(Trainer):
    """A trainer whose DDP spans all ranks, or one node. In the latter case initial weights differ between nodes."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, nodes: Sequence[int], way: str, **options: Any):
        node = nodes[group.rank()]
        self.own_group = group
        if way == "DDP of a node":
            ranks = [rank for rank, on in enumerate(nodes) if on == node]
            store = dist.PrefixStore(f"node{node}", group.get_group_store())
            self.own_group = gloo_group(store, ranks.index(group.rank()), len(ranks), TIMEOUT)
            model = copy.deepcopy(model)
            with torch.no_grad():
                model.last.weight.add_(node)
        super().__init__(self.own_group, model, lr=0.01, **options)
        self.data.manual_seed(1000 + group.rank())


def train(
    group: dist.ProcessGroup, nodes: Sequence[int], way: str, algorithm: tb.DiLoCoAlgorithm, num_steps: int = 2 * H + 3
) -> tuple[Trace, dict[str, int], NodeTrainer]:
    trainer = NodeTrainer(group, MODEL, nodes, way)
    own = tb.BaguaProcessGroup(group, nodes=nodes)
    with tb.attach(trainer.ddp, trainer.optimizer, algorithm, process_group=own) as attachment:
        for _ in range(num_steps):
            trainer.step()
        trainer.trace.start.append(weights_of(trainer.module))
        fragments = fragments_of(attachment.runner)
    trainer.trace.final = weights_of(trainer.module)
    return trainer.trace, fragments, trainer


MODEL = build(Normed)


@pytest.mark.parametrize(
    ("nodes", "way", "arguments"),
    [
        ("2 x 2", WAYS[0], {"delay": 1}),
        ("2 x 2", WAYS[1], {"fragments": 2, "delay": 1}),
        ("uneven", WAYS[0], {"fragments": 2}),
        pytest.param("2 x 4", WAYS[1], {"bucket_cap_mb": 0.001, "compression": None}, marks=pytest.mark.release),
    ],
)
def test_nodes_are_the_workers(nodes: str, way: str, arguments: dict[str, Any]) -> None:
    on, algorithm = NODES[nodes], tb.DiLoCoAlgorithm(H, **arguments)
    ranks = run_ranks(len(on), lambda group: train(group, on, way, algorithm))
    traces = [trace for trace, _, _ in ranks]
    check_rounds(traces, algorithm, ranks[0][1], on)
    for step in range(len(traces[0].updated)):
        parameters = [
            {name: weight for name, weight in trace.updated[step].items() if not is_buffer(name)} for trace in traces
        ]
        for node in set(on):
            assert_same_weights([weights for weights, its_node in zip(parameters, on, strict=True) if its_node == node])
        assert not torch.equal(parameters[0]["last.weight"], parameters[on.index(1)]["last.weight"])
    assert_same_weights([trace.final for trace in traces])


def test_gradients_are_the_means_of_a_node_until_detach_restores_ddp() -> None:
    """Both DDPs give bitwise equal weights in the first steps, which are plain SGD with the mean gradient."""
    on = NODES["2 x 2"]

    def body(group: dist.ProcessGroup) -> list[Weights]:
        firsts = [train(group, on, way, tb.DiLoCoAlgorithm(2), num_steps=1) for way in WAYS]
        trainer = firsts[0][2]
        assert trainer.ddp.broadcast_buffers
        for _ in range(2):
            trainer.step()  # DDP averages the gradients of all ranks
        return [*(trace.updated[0] for trace, _, _ in firsts), weights_of(trainer.module)]

    ranks = run_ranks(4, body)
    for of_all, of_node, last in ranks:
        for name, weight in of_all.items():
            if not is_buffer(name):  # a DDP of a node broadcasts the buffers of its first rank
                assert torch.equal(weight, of_node[name]), name
                assert torch.equal(last[name], ranks[0][2][name]), name
    for node in (0, 1):
        gradients = []
        for rank in (2 * node, 2 * node + 1):
            module = copy.deepcopy(MODEL)
            module(torch.randn(6, 10, generator=torch.Generator().manual_seed(1000 + rank))).square().sum().backward()
            gradients.append(module.last.weight.grad)
        expected = MODEL.last.weight.detach() - 0.01 * (gradients[0] + gradients[1]) / 2
        # Here another number of threads computes the gradients.
        torch.testing.assert_close(ranks[2 * node][0]["last.weight"], expected, rtol=1e-5, atol=1e-6)


def test_a_rank_that_hangs_is_noticed_within_its_node_after_the_timeout_of_attach() -> None:
    has_failed = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        on = [0, 0, 1]
        trainer = NodeTrainer(group, MODEL, on, WAYS[0])
        own = tb.BaguaProcessGroup(group, nodes=on, timeout=timedelta(seconds=1))
        attachment = tb.attach(trainer.ddp, trainer.optimizer, tb.DiLoCoAlgorithm(H), process_group=own)
        for _ in range(2):  # DDP rebuilds its buckets in the second step
            trainer.step()
        if group.rank() == 0:
            with pytest.raises(tb.CommunicationError, match=r"receiving from rank 1|sending to rank 1"):
                trainer.step()
            has_failed.set()
        assert has_failed.wait(20)
        leave_by_exception(attachment)

    run_ranks(3, body)


def test_one_node_is_flat() -> None:
    def body(group: dist.ProcessGroup) -> torch.Tensor:
        return train(group, [0, 0], WAYS[0], tb.DiLoCoAlgorithm(H), num_steps=2)[0].updated[1]["last.weight"]

    assert not torch.equal(*run_ranks(2, body))


def test_each_rank_sends_its_shard() -> None:
    """A rank sends half of its node's data to the other node, and only in steps with a round."""
    on, num_elements = NODES["2 x 2"], 1 << 15

    def body(group: dist.ProcessGroup) -> list[tb.observe.CommEvent]:
        ddp = DistributedDataParallel(nn.Linear(128, num_elements // 128, bias=False), process_group=group)
        optimizer, recorder = torch.optim.SGD(ddp.parameters(), lr=0.01), Recorder()
        algorithm = tb.DiLoCoAlgorithm(H, final_average=False)
        own = tb.BaguaProcessGroup(group, nodes=on)
        with tb.attach(ddp, optimizer, algorithm, process_group=own, observers=[recorder]):
            for _ in range(H + 1):
                optimizer.zero_grad()
                ddp(torch.ones(2, 128)).square().sum().backward()
                optimizer.step()
        return recorder.events

    for events in run_ranks(4, body):
        between = [event for event in events if event.phase == "send" and event.scope == "inter_node"]
        assert {event.step for event in between} == {H - 1}, "steps are numbered from 0"
        # Two phases, in each of which a rank sends half of its shard, itself half of the weights.
        assert sum(event.wire_bytes for event in between) == 2 * (num_elements // 2 // 2) * 4.25 / 8


def test_unsupported_modules_groups_and_join_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())  # Join gets its rank from torch's registry
    on = NODES["2 x 2"]

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, nodes=on)
        for module, message in (
            (copy.deepcopy(MODEL), "module must be a DistributedDataParallel, got Normed; with hierarchical=False"),
            (
                DistributedDataParallel(copy.deepcopy(MODEL), process_group=group, find_unused_parameters=True),
                "must have find_unused_parameters=False: with True, all nodes",
            ),
        ):
            optimizer = torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.01)
            with pytest.raises(ValueError, match=f"DiLoCoAlgorithm with hierarchical=True has DDP average .*{message}"):
                tb.attach(module, optimizer, "diloco", process_group=own)
            with tb.attach(module, optimizer, tb.DiLoCoAlgorithm(2, hierarchical=False), process_group=own):
                pass
        trainer = NodeTrainer(group, MODEL, on, "DDP of a node")
        other = tb.BaguaProcessGroup(group, nodes=[0, 0, 0, 1])
        message = rf"must have the module's ranks, or have them on one node: rank {group.rank() % 2} of 2, got"
        with pytest.raises(ValueError, match=message):
            tb.attach(trainer.ddp, trainer.optimizer, "diloco", process_group=other)
        with pytest.raises(ValueError, match=r"must have the module's ranks: rank . of 2, got rank . of 4"):
            tb.attach(trainer.ddp, trainer.optimizer, "decentralized", process_group=own)
        for joining in (trainer, NodeTrainer(group, MODEL, on, WAYS[0])):
            with (
                pytest.raises(RuntimeError, match=r"does not support torch\.distributed\.algorithms\.Join"),
                tb.attach(joining.ddp, joining.optimizer, "diloco", process_group=own),
                Join([joining.ddp]),
            ):
                joining.step()

    run_ranks(4, body)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_ddp_ignores_stay_local(way: str) -> None:
    on = NODES["2 x 2"]

    def body(group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODEL)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["last.bias", "norm.running_mean"])
        with torch.no_grad():
            model.last.bias.fill_(group.rank())
            model.norm.running_mean.fill_(group.rank())
        trainer = NodeTrainer(group, model, on, way)
        own = tb.BaguaProcessGroup(group, nodes=on)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.DiLoCoAlgorithm(2), process_group=own):
            trainer.module.eval()
            for _ in range(2):
                trainer.optimizer.zero_grad()
                trainer.ddp(torch.ones(2, 10)).square().sum().backward()
                trainer.module.last.bias.grad = None
                trainer.optimizer.step()
        assert trainer.module.last.bias.item() == group.rank()
        assert bool((trainer.module.norm.running_mean == group.rank()).all())

    run_ranks(4, body)
