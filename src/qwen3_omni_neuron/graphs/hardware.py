"""Published figures of Neuron chips; none of them was measured here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Published figures of one chip.

    physical_cores: share memory and engines evenly. lnc: physical cores a logical core, which is
    called a core everywhere else. memory_bytes, bytes_per_s (memory bandwidth), flops_per_s
    (bfloat16, dense): of the whole chip.
    """

    name: str
    physical_cores: int
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    lnc: int = 2

    @property
    def cores(self) -> int:
        """Number of logical cores."""
        return self.physical_cores // self.lnc

    @property
    def core_bytes(self) -> float:
        """Memory of a logical core."""
        return self.memory_bytes / self.cores

    def floor_s(self, flops: float, nbytes: float) -> float:
        """Return the least time in which one core computes and reads so much, both at once."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s) * self.cores


# At LNC=2, the default: 4 logical cores of 24 GiB.
TRN2 = Chip("trn2", 8, 96 * 2**30, 2.9e12, 667e12)
