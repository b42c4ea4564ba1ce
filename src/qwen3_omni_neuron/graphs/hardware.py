"""Published figures of Neuron chips; none of them was measured here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Published figures of one chip.

    cores: logical cores at LNC=2, which share memory and engines evenly. memory_bytes,
    bytes_per_s (memory bandwidth), flops_per_s (bfloat16, dense): of the whole chip.
    """

    name: str
    cores: int
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, flops: float, nbytes: float) -> float:
        """Return the least time in which one core computes and reads so much, both at once."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s) * self.cores


# At LNC=2, the default: two of the 8 physical cores are a logical one.
TRN2 = Chip("trn2", 4, 96 * 2**30, 2.9e12, 667e12)
