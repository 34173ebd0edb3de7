"""Buckets: a flat tensor of several parameters' values and the operations that a lane runs on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchbagua.collectives import BaguaProcessGroup, centralized_mean
from torchbagua.compressors import Compressor, by_name


@dataclass(frozen=True)
class BaguaTensor:
    """A parameter's place in a bucket.

    Attributes:
        name: the parameter's name in its module; behind the plain hook, which knows no module, its place in the bucket.
        parameter: the parameter itself, for its shape and identity.
    """

    name: str
    parameter: torch.Tensor


Operation = Callable[["BaguaBucket"], None]


class BaguaBucket:
    """A flat tensor and the ordered operations to run on it.

    Args:
        name: for errors and events.
        tensors: the parameters whose values (gradients, say) lie one after the other in the flat tensor.
        group: the group that operations use unless they are given another.
        flat: the flat tensor, contiguous, as long as the tensors together; where it is another one in each step
            (DDP's), it is set before `run`, and is alike.

    Raises:
        ValueError: `flat` is not such a tensor.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[BaguaTensor],
        group: BaguaProcessGroup,
        flat: torch.Tensor,
    ) -> None:
        num_elements = sum(tensor.parameter.numel() for tensor in tensors)
        if flat.shape != (num_elements,) or not flat.is_contiguous():
            raise ValueError(
                f"BaguaBucket: flat must be contiguous, [{num_elements}] as its tensors together, got "
                f"{'' if flat.is_contiguous() else 'non-contiguous '}{list(flat.shape)}"
            )
        self.name = name
        self.tensors = tuple(tensors)
        self.group = group
        self.flat = flat
        self._operations: list[Operation] = []
        self._groups = [group]

    def run(self) -> torch.Tensor:
        """Run the operations in order, in place on `flat`, and return it; one that raises fails the step.

        It then closes the groups of all operations, since no later message on them would be matched, and so that peers
        hear of it at once.
        """
        try:
            for operation in self._operations:
                operation(self)
        except BaseException:
            for group in self._groups:
                group.close()
            raise
        return self.flat

    def clear_ops(self) -> "BaguaBucket":
        """Remove all operations."""
        self._operations.clear()
        return self

    def append_python_op(
        self,
        python_function: Callable[["BaguaBucket", BaguaProcessGroup], None],
        group: BaguaProcessGroup | None = None,
    ) -> "BaguaBucket":
        """Append a function of the bucket and the group, which changes `bucket.flat` in place.

        It runs on the lane's thread and may communicate over `group.world.process_group` with torch.distributed. Where
        it raises, the training step raises a RuntimeError that names the function, the bucket and the error.
        """
        group = self._using(group)
        name = getattr(python_function, "__qualname__", repr(python_function))

        def operation(bucket: "BaguaBucket") -> None:
            try:
                python_function(bucket, group)
            except Exception as error:
                raise RuntimeError(
                    f"torchbagua: {name} on {bucket.name} failed: {type(error).__name__}: {error}"
                ) from error

        self._operations.append(operation)
        return self

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | Compressor | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> "BaguaBucket":
        """Append the mean (or sum) of the flat tensor over the group, bit-identical on all ranks afterwards.

        Args:
            hierarchical: respect node boundaries, where there are several nodes: full precision within them.
            average: divide by the number of ranks.
            scattergather: accepted for Bagua's sake; every mean here is a scatter and a gather.
            compression: None for full precision, "MinMaxUInt8", "bfloat16", "float16", or a Compressor.
            group: default the bucket's.

        Raises:
            ValueError: no compression has that name.
        """
        mean = centralized_mean(
            self._using(group),
            by_name(compression),
            [tensor.parameter.numel() for tensor in self.tensors],
            self.flat.dtype,
            self.flat.device,
            hierarchical=hierarchical,
            average=average,
            bucket=self.name,
        )
        self._operations.append(lambda bucket: mean(bucket.flat))
        return self

    def _using(self, group: BaguaProcessGroup | None) -> BaguaProcessGroup:
        if group is not None and group not in self._groups:
            self._groups.append(group)
        return group or self.group
