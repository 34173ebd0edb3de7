"""Writes the list of errors and warnings in docs/api/errors.md, each with an example that this program raises.

python docs_build/errors.py    # takes a few seconds; `make tables` runs it
"""

import json
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from markers import fill
from torchbagua import elastic
from torchbagua.codecs import MinMaxUInt8, WireLayout
from torchbagua.elastic.members import Changes, Mailboxes, Member, Membership
from torchbagua.observe.events import Run, TraceError
from torchbagua.observe.perfetto import RankFileWriter
from torchbagua.testing import check_algorithm, check_codec, check_transport
from torchbagua.testing.simulation import Subject
from torchbagua.transport import Members, Transport
from torchbagua.transport.gloo import GlooTransport

PAGE = Path(__file__).parent.parent / "docs" / "api" / "errors.md"
PROGRAM = "docs_build/errors.py"  # as markers name it
TIMEOUT = timedelta(seconds=60)


class Example(NamedTuple):
    """A class of errors or warnings.

    Attributes:
        name: of the class, as users import it, or as Python names it.
        raised_when: the condition, for the table.
        action: how the user fixes it.
        fail: raises the example, or warns of it.
    """

    name: str
    raised_when: str
    action: str
    fail: Callable[[], object]


def _groups(size: int, timeout: timedelta = TIMEOUT) -> list[dist.ProcessGroup]:
    """Return gloo groups of one process, one for each rank."""
    store, groups = dist.HashStore(), [None] * size

    def open_group(rank: int) -> None:
        prefixed = dist.PrefixStore("errors", store)
        group = dist.ProcessGroup(prefixed, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        groups[rank] = group

    _on_threads(size, open_group)
    return groups


def _on_threads(size: int, body: Callable[[int], object]) -> None:
    """Run `body(rank)` on a thread for each rank, and raise the error of the lowest rank."""
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            body(rank)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]


def _model(group: dist.ProcessGroup | None = None) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(torch.nn.Linear(8, 2), process_group=group)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def _argument_out_of_range() -> None:
    tb.TopKAlgorithm(ratio=2)


def _module_of_wrong_type() -> None:
    net = torch.nn.Linear(8, 2)
    tb.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "bytegrad")


def _summary_without_observers() -> None:
    ddp, optimizer = _model()
    with tb.attach(ddp, optimizer, "bytegrad") as attachment:
        attachment.summary()


def _rank_is_missing() -> None:
    tb.BaguaProcessGroup(_groups(2)[0], timeout=timedelta(milliseconds=200))


def _peer_does_not_take_part() -> None:
    groups, has_failed = _groups(2), threading.Event()

    def body(rank: int) -> None:
        own = tb.BaguaProcessGroup(groups[rank], timeout=timedelta(seconds=1))
        own.open()
        if rank == 0:
            try:
                own.all_reduce(torch.ones(4))
            finally:
                has_failed.set()
        has_failed.wait()
        own.close()

    _on_threads(2, body)


def _parameters_in_full_precision() -> None:
    groups = _groups(2)

    def body(rank: int) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(8, 2).double(), process_group=groups[rank])
        tb.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "bytegrad").detach()

    _on_threads(2, body)


def _optimizer_does_not_suit() -> None:
    ddp, _ = _model()
    tb.attach(ddp, torch.optim.Adam(ddp.parameters()), "topk").detach()


def _transport_lacks_a_method() -> None:
    class NoCollectives(Transport):
        name = "MyTransport"

        def abort(self) -> None:
            """Nothing to close."""

    NoCollectives().all_reduce(torch.ones(1))


def _transport_is_closed() -> None:
    transport = GlooTransport(Members(_groups(1)[0], (0,), 0, "world", TIMEOUT, (0,)))
    transport.abort()
    transport.post_send(0, torch.ones(1), 0)


@dataclass(frozen=True)
class Still(tb.Algorithm):
    """An algorithm that drops all gradients."""

    def make_impl(self, runner: tb.extend.GradientRunner) -> tb.AlgorithmImpl:
        return StillImpl(runner)


class StillImpl(tb.AlgorithmImpl):
    """Writes zeros."""

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_python_op(lambda bucket, group: bucket.flat.zero_())


def _algorithm_breaks_a_promise() -> None:
    check_algorithm(Subject(lambda _: Still()))


class Clipped(MinMaxUInt8):
    """A codec that changes the values that it encodes."""

    def encode(self, x_N: torch.Tensor, layout: WireLayout, wire_W: torch.Tensor) -> None:
        super().encode(x_N.clamp_(-1, 1), layout, wire_W)


def _codec_breaks_a_promise() -> None:
    check_codec(Clipped())


def _transport_breaks_a_promise() -> None:
    class LosesResultOfRank1(GlooTransport):
        def __init__(self, members: Members) -> None:
            super().__init__(members)
            self.rank = members.rank

        def all_reduce(self, tensor: torch.Tensor) -> None:
            super().all_reduce(tensor)
            if self.rank == 1:
                tensor.zero_()

    check_transport(LosesResultOfRank1, size=2)


def _two_traces_of_one_file() -> None:
    name = "ByteGradAlgorithm"
    run = Run(id="demo", algorithm=name, description=name, rank=0, nodes=(0,), settings={}, board=None)
    with tempfile.TemporaryDirectory() as folder:
        try:
            writers = [RankFileWriter(Path(folder), run) for _ in range(2)]
            assert not writers, "the second is an error"
        except TraceError as error:
            raise TraceError(str(error).replace(folder, "traces")) from error


def _refuse(member: Member) -> dist.Store:
    raise ConnectionRefusedError


def _elastic_rank() -> tuple[Changes, Membership]:
    """Return rank 0 of three, of which the others have ended."""
    members = [Member(str(rank), f"10.0.0.{rank + 1}", 29400) for rank in range(3)]
    changes = Changes(Mailboxes(members[0], dist.HashStore(), _refuse), timedelta(seconds=30))
    changes.enter(Membership(3, tuple(members)))
    return changes, Membership(3, tuple(members))


def _too_few_ranks_are_left() -> None:
    changes, membership = _elastic_rank()
    changes.agree(membership)


def _the_others_continue() -> None:
    changes, membership = _elastic_rank()
    others = json.dumps([asdict(member) for member in membership.members[1:]])
    changes.mailboxes.store.set("decided/4", others)
    changes.agree(membership)


def _no_step_is_finished() -> None:
    def train(run: elastic.Run) -> None:
        raise tb.CommunicationError("a rank has failed")

    dist.destroy_process_group()  # `elastic.run` opens the default group
    try:
        model = torch.nn.Linear(2, 1)
        elastic.run(train, model, torch.optim.SGD(model.parameters()), "bytegrad", sampler=elastic.Sampler(range(100)))
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


EXAMPLES: Sequence[Example] = (
    Example(
        "ValueError",
        "An argument has a value that is not allowed, or ranks passed different values.",
        "Pass a value that the message allows.",
        _argument_out_of_range,
    ),
    Example(
        "TypeError",
        "An argument has a type that is not allowed.",
        "Pass an object of the type that the message names.",
        _module_of_wrong_type,
    ),
    Example(
        "RuntimeError",
        "A call comes at the wrong time, or a function of yours, such as a codec, raised on the lane.",
        "Call in the order that the message gives, or fix the function.",
        _summary_without_observers,
    ),
    Example(
        "TimeoutError",
        "A rank did not construct the same `BaguaProcessGroup`, or call the same `attach`, in time.",
        "Find out why the named ranks are late; start all ranks, or raise `timeout`.",
        _rank_is_missing,
    ),
    Example(
        "torchbagua.CommunicationError",
        "Communication failed after the start: a rank died, closed its group, or took longer than the timeout.",
        "Restart from a checkpoint; see [Restarts](../guides/restarts.md).",
        _peer_does_not_take_part,
    ),
    Example(
        "torchbagua.elastic.EvictedError",
        "The other ranks of an [elastic training](../guides/elastic.md) continue without this one.",
        "Start the rank again, so that it joins them.",
        _the_others_continue,
    ),
    Example(
        "torchbagua.elastic.NoQuorumError",
        "Too few ranks of an elastic training are left to continue.",
        "Restart from a checkpoint.",
        _too_few_ranks_are_left,
    ),
    Example(
        "torchbagua.elastic.NoProgressError",
        "Five memberships of an elastic training in a row have not finished a step.",
        "Look at the errors of the ranks that have ended, and at the batch at this position.",
        _no_step_is_finished,
    ),
    Example(
        "torchbagua.transport.TransportError",
        "A transport failed. `attach` and training raise it as a `CommunicationError`; only code that uses a transport "
        "directly sees it.",
        "See the message.",
        _transport_is_closed,
    ),
    Example(
        "torchbagua.transport.LacksAbility",
        "A transport was asked for an operation that it does not implement.",
        "Implement the method, or remove it from `abilities`.",
        _transport_lacks_a_method,
    ),
    Example(
        "torchbagua.testing.transports.TransportFault",
        "`check_transport` found that a transport of yours breaks its contract.",
        "Fix the named operation.",
        _transport_breaks_a_promise,
    ),
    Example(
        "torchbagua.testing.algorithms.AlgorithmFault",
        "`check_algorithm` found that an algorithm of yours breaks what `attach` promises.",
        "See the message, and repeat the check after each change.",
        _algorithm_breaks_a_promise,
    ),
    Example(
        "torchbagua.testing.codecs.CodecFault",
        "`check_codec` found that a codec of yours breaks its contract.",
        "Fix the named operation.",
        _codec_breaks_a_promise,
    ),
    Example(
        "torchbagua.observe.events.TraceError",
        "A trace cannot continue. Training continues without the trace, and a warning shows the message.",
        "Give each trace a separate path.",
        _two_traces_of_one_file,
    ),
    Example(
        "torchbagua.UncompressedParametersWarning",
        "Parameters are sent in full precision, because the codec does not encode their dtype.",
        "Convert the parameters, choose another codec, or ignore the warning. A filter turns it into an error.",
        _parameters_in_full_precision,
    ),
    Example(
        "RuntimeWarning",
        "Training continues, but probably not as you expect: an unsuitable optimizer, a bucket size that costs time, "
        "gradients that bypass DDP, a kernel that cannot be compiled.",
        "Do what the message says.",
        _optimizer_does_not_suit,
    ),
)


def message_of(example: Example) -> str:
    """Return the text of the error or warning that an example gives."""
    expected = example.name.rpartition(".")[2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            example.fail()
        except Exception as error:
            if type(error).__name__ != expected:
                raise
            return str(error)
    for warning in caught:
        if warning.category.__name__ == expected:
            return str(warning.message)
    raise AssertionError(f"{example.name}: the example gave {[str(warning.message) for warning in caught]}")


def error_list() -> str:
    """Each class with when it is raised, an example, and what to do."""
    sections = []
    for example in EXAMPLES:
        package, _, name = example.name.rpartition(".")
        full_name = f"`{example.name}`\n\n" if package else ""
        sections.append(
            f"## {name}\n\n{full_name}{example.raised_when} {example.action}\n\n```text\n{message_of(example)}\n```\n"
        )
    return "\n" + "\n".join(sections) + "\n"


def updated() -> str:
    """Return the text that the page should have."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return fill(PAGE.read_text("utf-8"), PROGRAM, {"error_list": error_list})


def main() -> None:
    """Write the page if it is not up to date."""
    text = updated()
    if text != PAGE.read_text("utf-8"):
        PAGE.write_text(text, "utf-8")
        print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
