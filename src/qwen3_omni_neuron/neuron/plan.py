"""What a decoder is compiled for."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecoderPlan:
    """Three graphs over one set of weights and one KV cache: prefill of one prompt, decode of one
    slot, decode of all slots.

    tp: how many cores share each weight. context_length: positions a slot. prompt_buckets: rows
    that prompts are padded to. decode_buckets: positions that a decode step looks back on, padded.
    Both ascend, and end with context_length. on_cpu: run NxDI's CPU mode, without a device.
    """

    tp: int
    slots: int
    context_length: int
    prompt_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    def __post_init__(self) -> None:
        for name in ("prompt_buckets", "decode_buckets"):
            buckets: tuple[int, ...] = getattr(self, name)
            ascending = list(buckets) == sorted(set(buckets))
            if not buckets or not ascending or buckets[-1] != self.context_length:
                raise ValueError(
                    f"{name} are {buckets}; they must ascend and end with the context length, "
                    f"{self.context_length}."
                )
