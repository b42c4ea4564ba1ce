"""The thinker's and the talker's decoder over NxDI, from a checkpoint and a plan.

What comes back is neither compiled nor loaded: see application.DecoderApplication.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.nxdi.plan import DecoderPlan, decoder_plan

if TYPE_CHECKING:  # NxDI is imported only where a decoder is built
    from qwen3_omni_neuron.neuron.nxdi.application import DecoderApplication
from qwen3_omni_neuron.neuron.nxdi.source import DecoderWeights

DECODERS = ("thinker", "talker")
"""The parts that are NxDI's models; the others are traced from the modules of model/."""


@dataclass(frozen=True)
class DecoderSpec:
    """One of DECODERS, of a checkpoint's config, as a plan has it."""

    part: str
    config: OmniConfig
    compiled: CompilePlan

    @property
    def plan(self) -> DecoderPlan:
        """In NxDI's terms."""
        return decoder_plan(self.compiled, self.part)

    @property
    def takes_rows(self) -> bool:
        """The talker; the thinker takes tokens and media."""
        return self.part == "talker"


def decoder_application(
    part: str, checkpoint: Checkpoint, config: OmniConfig, plan: DecoderPlan
) -> "DecoderApplication":
    """part: "thinker", which captures the accept layer, or "talker", which captures what its head
    takes: the last row, normed. Raises OptionError where the plan does not fit it."""
    from qwen3_omni_neuron.neuron.nxdi.application import DecoderApplication
    from qwen3_omni_neuron.neuron.nxdi.inference_config import Capture, inference_config

    c = decoder_config(config, part)
    if part == "thinker":
        accept_layer = config.talker.accept_hidden_layer if config.talker else 0
        # hidden_states[n] as the reference counts them is what layer n - 1 puts out, and
        # hidden_states[0] what layer 0 takes.
        capture = Capture(f"layers.{max(0, accept_layer - 1)}", output=accept_layer > 0)
        layers = len(config.thinker.vision.deepstack_layers)
        inference = inference_config(c, plan, capture, takes_rows=False, deepstack_layers=layers)
    else:
        inference = inference_config(c, plan, Capture("lm_head", output=False), takes_rows=True)
    return DecoderApplication(inference, plan, DecoderWeights.of(part, checkpoint, config))
