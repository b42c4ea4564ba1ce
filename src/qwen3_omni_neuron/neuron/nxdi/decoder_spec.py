"""Description of a decoder, the thinker's or the talker's, to be compiled or loaded."""

from dataclasses import dataclass

import torch

from qwen3_omni_neuron.compilation.buckets import buckets_within
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig

DECODERS = ("thinker", "talker")
"""The parts that are NxDI's models; the others are traced from the modules of model/."""


@dataclass(frozen=True)
class DecoderPlan:
    """The sizes of a decoder's graphs, which share one set of weights and one KV cache.

    The graphs are a prefill of one prompt for each of `prompt_buckets`, and a decode step for each
    pair of `batches` and `decode_buckets`.

    tp: number of cores that share each weight.
    context_length: positions of a slot.
    prompt_buckets: rows that prompts are padded to.
    decode_buckets: positions of a slot that a decode step reads, padded; ends with context_length.
    batches: rows of the decode graphs, ascending; ends with `slots`. Default: one and `slots`.
    lnc: physical cores of a logical core, as in NEURON_LOGICAL_NC_CONFIG.
    profile: how a prompt's experts are computed: "safe", in plain torch operations, or "fast", by
        NxDI's blockwise kernels (see neuron.nxdi.experts).
    """

    tp: int
    slots: int
    context_length: int
    prompt_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    dtype: torch.dtype
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


@dataclass(frozen=True)
class DecoderSpec:
    """Description of one decoder to be compiled or loaded. part: one of DECODERS."""

    part: str
    config: OmniConfig
    plan: DecoderPlan

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder's own config."""
        return decoder_config(self.config, self.part)

    @property
    def takes_rows(self) -> bool:
        """True for the talker, whose inputs are rows; the thinker's are tokens and media."""
        return self.part == "talker"

    @property
    def deepstack_layers(self) -> int:
        """The number of first layers to whose output rows of images are added: the thinker's."""
        return 0 if self.takes_rows else len(self.config.thinker.vision.deepstack_layers)


def decoder_spec(config: OmniConfig, plan: CompilePlan, part: str) -> DecoderSpec:
    """Return the spec of one of DECODERS, with the sizes that a compile plan has for it.

    Raises OptionError where the plan's sizes don't fit each other.
    """
    context = plan.context_length if part == "thinker" else plan.talker_context_length
    sizes = DecoderPlan(
        tp=plan.tp,
        slots=plan.max_concurrency,
        context_length=context,
        prompt_buckets=plan.prompt_buckets,
        decode_buckets=buckets_within(context, plan.decode_buckets),
        dtype=getattr(torch, plan.dtype),
        batches=plan.batches,
        lnc=plan.lnc,
        profile=plan.profile,
    )
    return DecoderSpec(part, config, sizes)
