"""Description of the thinker's or the talker's decoder, and the check of its experts' widths."""

from dataclasses import dataclass, replace

import torch

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.engines.buckets import buckets_within
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.neuron.graphs.decoders import decoder_config

EXECUTABLE_FILE = "model.pt"
DECODERS = ("thinker", "talker")
"""The parts that are NxDI's models; the others are traced from the modules of model/."""


@dataclass(frozen=True)
class DecoderSpec:
    """Description of one decoder to be compiled or loaded. part: one of DECODERS.

    Its graphs share one set of weights and one KV cache: a prefill of one prompt for each of the
    plan's `prompt_buckets`, and a decode step for each pair of `batches` and `decode_buckets`.
    plan: its context_length is the decoder's own, with which decode_buckets end.
    """

    part: str
    config: OmniConfig
    plan: CompilePlan

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder's own config."""
        return decoder_config(self.config, self.part)

    @property
    def tp(self) -> int:
        """Number of cores that share the weights."""
        return self.plan.degree(self.part)

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and of weights, but for the experts if they are int8."""
        dtype: torch.dtype = getattr(torch, self.plan.arithmetic)
        return dtype

    @property
    def int8(self) -> bool:
        """True if the routed experts are int8 with a float32 scale for each output."""
        return self.plan.dtype == "int8" and self.part == "thinker"

    @property
    def takes_rows(self) -> bool:
        """True for the talker, whose inputs are rows; the thinker's are tokens and media."""
        return self.part == "talker"

    @property
    def deepstack_layers(self) -> int:
        """Number of first layers whose output gets image rows added; 0 for the talker."""
        return 0 if self.takes_rows else len(self.config.thinker.vision.deepstack_layers)


def decoder_spec(config: OmniConfig, plan: CompilePlan, part: str) -> DecoderSpec:
    """Return the spec of one of DECODERS, with a compile plan's sizes for it.

    Raises OptionError for prompts that are longer than the decoder's KV cache.
    """
    context = plan.context_length if part == "thinker" else plan.talker_context_length
    if plan.prompt_buckets[-1] > context:
        raise OptionError(
            f"prompt_buckets has {plan.prompt_buckets[-1]}, and the {part}'s KV cache {context} "
            "positions. Leave talker_context_length out, or raise it."
        )
    windows = buckets_within(context, plan.decode_buckets)
    return DecoderSpec(part, config, replace(plan, context_length=context, decode_buckets=windows))


def check_experts(c: DecoderConfig, plan: CompilePlan) -> None:
    """Check that the plan's cores can share these experts. Raises OptionError if not."""
    assert c.moe is not None
    tp = plan.tp.thinker  # every part's on this target
    for owner, width in (
        ("the shared expert", c.moe.shared_expert_width),
        ("a routed expert", c.moe.expert_width),
    ):
        if width % tp:
            raise OptionError(
                f"the width of {owner}, {width}, can't be cut over {tp} cores. Choose another "
                "TP degree."
            )
