"""What ranks tell each other while they start: JSON, which decodes to data and nothing else.

PyTorch's own gathering of objects unpickles what the peers send.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

T = TypeVar("T")
MOST_BYTES = 16 << 20
"""Of one rank's: what they tell takes a few kilobytes."""


def gather(mine: T, of: type[T], group: Any) -> list[T]:
    """What every rank of a CPU `group` gives, in rank order; a collective call.

    Args:
        of: the type that each must decode to.

    Raises:
        ValueError: a rank gives something else, or far too much.
    """
    own = msgspec.json.encode(mine)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    lengths = [int(size) for size in sizes]
    if not all(0 < length <= MOST_BYTES for length in lengths):
        raise ValueError(f"ranks tell {lengths} bytes each; 1 to {MOST_BYTES} were expected")
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    given = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(given, padded, group=group)
    try:
        return [
            msgspec.json.decode(one[:length].numpy().tobytes(), type=of)
            for one, length in zip(given, lengths, strict=True)
        ]
    except msgspec.DecodeError as error:
        raise ValueError(f"a rank tells what is no {of}: {error}") from error
