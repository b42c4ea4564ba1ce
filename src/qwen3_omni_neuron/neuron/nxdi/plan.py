"""What a decoder is compiled for: its part of a compile plan, in NxDI's terms."""

from dataclasses import dataclass

import torch

from qwen3_omni_neuron.compilation.buckets import buckets_within
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.errors import OptionError


@dataclass(frozen=True)
class DecoderPlan:
    """Several graphs over one set of weights and one KV cache: prefill of one prompt, and decode
    of as many slots as each of `batches` says.

    tp: how many cores share each weight. context_length: positions a slot. prompt_buckets: rows
    that prompts are padded to. decode_buckets: positions that a decode step looks back on, padded,
    the last of them context_length. on_cpu: run NxDI's CPU mode, without a device.
    batches: rows of the decode graphs, ascending, the last `slots`; none: one and `slots`.
    lnc: physical cores that a core of `tp` is made of, as NEURON_LOGICAL_NC_CONFIG says.
    profile: of the experts in prefill: "safe", plain torch operations, or "fast", NxDI's blockwise
    kernels (see neuron.experts), which no CPU runs.
    """

    tp: int
    slots: int
    context_length: int
    prompt_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    batches: tuple[int, ...] = ()
    lnc: int = 2
    profile: str = "safe"

    def __post_init__(self) -> None:
        if not self.batches:
            object.__setattr__(self, "batches", tuple(sorted({1, self.slots})))
        for name, last, meaning in (
            ("prompt_buckets", self.prompt_buckets[-1], "the longest prompt"),
            ("decode_buckets", self.context_length, "the context length"),
            ("batches", self.slots, "the number of slots"),
        ):
            sizes: tuple[int, ...] = getattr(self, name)
            ascending = list(sizes) == sorted(set(sizes))
            if not ascending or sizes[-1] != last or sizes[0] < 1 or last > self.context_length:
                raise OptionError(
                    f"{name} are {sizes}; they must ascend and end with {meaning}, {last}."
                )
        if self.profile == "fast" and self.on_cpu:
            raise OptionError(
                'profile "fast" takes kernels of the Neuron SDK, which no CPU runs. Choose "safe" '
                "for NxDI's CPU mode."
            )


def decoder_plan(plan: CompilePlan, part: str, on_cpu: bool = False) -> DecoderPlan:
    """part: "thinker" or "talker". on_cpu: for NxDI's CPU mode. Raises OptionError for profile
    "fast" there."""
    context = plan.context_length if part == "thinker" else plan.talker_context_length
    return DecoderPlan(
        tp=plan.tp,
        slots=plan.max_concurrency,
        context_length=context,
        prompt_buckets=plan.prompt_buckets,
        decode_buckets=buckets_within(context, plan.decode_buckets),
        dtype=getattr(torch, plan.dtype),
        on_cpu=on_cpu,
        batches=plan.batches,
        lnc=plan.lnc,
        profile=plan.profile,
    )
