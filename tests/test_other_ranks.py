"""States of another number of ranks: what of them remains, for every algorithm, by the rule of rank_state.py."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from elastic_trials import ALGORITHMS, loss_of, make_training
from ranks import run_ranks
from torchbagua.integrations import rank_files
from torchbagua.runtime.rank_state import OF_PLACE, OF_RANK

pytestmark = pytest.mark.filterwarnings("ignore:torchbagua")

# After each change of the ranks, as with a checkpoint that every rank has written: with fewer ranks, more, and one.
SIZES = [(3, 2), (2, 3), (2, 1), (1, 2)]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_state_of_another_number_of_ranks(name: str, sizes: tuple[int, int]) -> None:
    def train(group: dist.ProcessGroup, saved: list[dict[str, Any]] | None) -> dict[str, Any]:
        model, optimizer, algorithm = make_training(ALGORITHMS[name])
        module = model if algorithm.averages_weights else DistributedDataParallel(model, process_group=group)
        with tb.attach(module, optimizer, algorithm, process_group=group) as attachment:
            if saved is not None:
                own = copy.deepcopy(saved[group.rank() if group.rank() < len(saved) else 0])
                model.load_state_dict(own["model"])
                optimizer.load_state_dict(own["optimizer"])
                attachment.load_state_dict(own["attachment"])
                check(own["attachment"]["impl"], attachment.state_dict()["impl"], is_new=group.rank() >= len(saved))
            for step in range(6):
                optimizer.zero_grad()
                loss_of(module, (torch.arange(4) + 4 * (step + 6 * group.rank())) % 60).backward()
                optimizer.step()
            return copy.deepcopy(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "attachment": attachment.state_dict(),
                }
            )

    def check(saved: dict[str, Any], loaded: dict[str, Any], *, is_new: bool) -> None:
        compare({**saved, **saved.get("residuals", {})}, {**loaded, **loaded.get("residuals", {})}, is_new=is_new)

    def compare(saved: dict[str, Any], loaded: dict[str, Any], *, is_new: bool) -> None:
        has_one = 1 in sizes
        for kind in saved.keys() & loaded.keys() - {"rank", "num_ranks", "nodes", "residuals", "outer"}:
            before, after = saved[kind], loaded[kind]
            if not isinstance(before, dict):
                assert has_one or before == after or kind == "has_differences", kind
            elif kind in OF_PLACE or (is_new and kind in OF_RANK):
                assert name == "low_precision_decentralized" or not any(each.any() for each in after.values()), kind
            elif before.keys() == after.keys():  # a single rank keeps nothing for the others
                assert all(torch.equal(each, after[key]) for key, each in before.items()), kind

    saved = run_ranks(sizes[0], lambda group: train(group, None))
    models = [each["model"] for each in run_ranks(sizes[1], lambda group: train(group, saved))]
    if not make_training(ALGORITHMS[name])[2].averages_weights:
        for model in models:
            assert all(torch.equal(each, models[0][key]) for key, each in model.items())


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_did_not_save_loads_the_file_of_rank_0(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Attachment:
        def load_rank_state_dict(self, state: int) -> None:
            self.loaded = state

    def gather(found: list[Any], own: Any) -> None:
        found[:] = [own] * 4

    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    for saved in range(2):
        torch.save(saved, tmp_path / f"state_{saved}.pt")
    for load in (
        lambda attachment: rank_files.load_noted_rank_state(attachment, tmp_path / "state", 2),
        lambda attachment: rank_files.load_gathered_rank_state(attachment, [0, 1]),
    ):
        attachment: Any = Attachment()
        load(attachment)
        assert attachment.loaded == (rank if rank < 2 else 0)
