"""What the vendor publishes of the chips: none of it measured here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """cores: logical ones, which share memory and engines evenly. memory_bytes, bytes_per_s (of
    memory), flops_per_s (bfloat16, dense): of the whole chip."""

    name: str
    cores: int
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, flops: float, nbytes: float) -> float:
        """The least time in which one core computes and reads so much, both at once."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s) * self.cores


# At LNC=2, the default: two of the 8 physical cores are a logical one.
TRN2 = Chip("trn2", 4, 96 * 2**30, 2.9e12, 667e12)
