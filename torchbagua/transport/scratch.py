"""Scratch memory that the collectives of one group share."""

import torch


class Scratch:
    """Memory by role, as long as the longest part requested.

    The users of one group run one after the other, so each finds the memory still in the caches. On a GPU this holds
    per stream: FSDP gathers weights on one stream while it scatters gradients on another.
    """

    def __init__(self) -> None:
        # By role and stream, then by the number of bytes.
        self._parts: dict[tuple[str, torch.cuda.Stream | None], dict[int, torch.Tensor]] = {}

    def part(self, role: str, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for `role`, [num_bytes] uint8.

        A request of the same length returns the same tensor, unless a longer part was requested in between.
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
