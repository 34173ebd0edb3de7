"""Memory that the collectives of one group share."""

import torch


class Scratch:
    """Memory by its role, as long as the longest part that was asked for.

    Users of one group come one after the other, and what the last has left in the caches the next one finds there. On a
    GPU they do so on one stream each: FSDP gathers weights on one, while it scatters gradients on another.
    """

    def __init__(self) -> None:
        # By the role, the stream and the number of bytes.
        self._parts: dict[tuple[str, torch.cuda.Stream | None], dict[int, torch.Tensor]] = {}

    def part(self, role: str, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for `role`, [num_bytes] uint8.

        It is the same tensor as for whoever asked for as much before, unless more has been asked for since.
        """
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        parts = self._parts.setdefault((role, stream), {})
        part = parts.get(num_bytes)
        if part is None or part.device != device:
            largest = parts[max(parts)] if parts else None
            if largest is None or largest.numel() < num_bytes or largest.device != device:
                parts.clear()
                largest = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            part = parts[num_bytes] = largest[:num_bytes]
        return part
