"""Run the checks of AllReduceAggregation for AllReduceAggregationHVD, on one rank of test_horovod.py.

Started by horovodrun, or by torchrun; with torchrun, Horovod is initialized over torch's group.
"""

import os

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from aggregation_checks import (
    check_bad_denominators,
    check_every_kind_of_parameter,
    check_reference_values,
    constant_model,
)
from torchbagua.compat.mlbench import AllReduceAggregationHVD
from torchbagua.compat.mlbench.horovod import init_from_torch


def main() -> None:
    with pytest.raises(RuntimeError, match=r"hvd\.init\(\), under horovodrun"):
        AllReduceAggregationHVD(2).agg_grad()(constant_model(0), "avg_world")
    if "HOROVOD_RANK" in os.environ:
        hvd.init()
        assert not dist.is_initialized()
    else:
        dist.init_process_group("gloo")
        init_from_torch()
        assert (hvd.rank(), hvd.local_size()) == (dist.get_rank(), 2)
    rank, size = hvd.rank(), hvd.size()
    assert size == 2
    check_reference_values(rank, lambda **options: AllReduceAggregationHVD(size, **options))
    recorder, summary = tb.observe.Recorder(), tb.observe.Summary()
    with AllReduceAggregationHVD(size, observers=[recorder, summary]) as aggregation:
        for by_layer in (False, True):
            check_every_kind_of_parameter(rank, size, aggregation, by_layer=by_layer)
        check_bad_denominators(rank, aggregation)
        with pytest.raises(NotImplementedError, match="Allreduce not implemented for op=sum"):
            aggregation.agg_grad()(constant_model(rank), "sum")
        with pytest.raises(tb.CommunicationError, match="out of step"):
            aggregation.agg_model(by_layer=rank == 0)(constant_model(rank), "avg_world")
    with pytest.raises(RuntimeError, match=r"world_size must be hvd\.size\(\), which is 2, got 3.*horovodrun"):
        AllReduceAggregationHVD(3).agg_grad()(constant_model(rank), "avg_world")
    assert summary.figures.num_steps == 5
    assert recorder.bytes_sent > 0
    torch.manual_seed(0)
    print("as it should be")
    hvd.shutdown()


if __name__ == "__main__":
    main()
