"""Decoders in NxDI's CPU mode, which runs NxDI's own modules without a device; engines over them.

Thinker and talker are NxDI's; encoders, code predictor, projections and vocoder run model/ on the
CPU.
"""

from typing import TYPE_CHECKING

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu.eager import media_encoders, talker_engine, vocoder_engine
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec, decoder_spec
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import DecoderGraphs
from qwen3_omni_neuron.neuron.nxdi.slots import NxdiSlots, NxdiThinkerSlots
from testing.models import load_host_models

if TYPE_CHECKING:  # NxDI can be imported after testing.neuron.nxdi_sources.make_importable
    from testing.neuron.cpu_mode_decoder import CpuModeDecoder


def build_cpu_mode_engines(spec: EngineSpec) -> Engines:
    """Build the engines of all stages.

    With tp over 1 every rank has to build the same engines, and make the same calls in the same
    order; the pipeline's threads don't, so it runs with tp 1.
    Raises CheckpointError (see checkpoint.parameters.load_parts), and what decoder_in_cpu_mode
    raises.
    """
    config = spec.config
    host = load_host_models(Checkpoint(spec.plan.model), config, spec.dtype)
    media = media_encoders(host, spec)

    def graphs(part: str) -> DecoderGraphs:
        decoder = decoder_spec(config, spec.plan, part)
        return decoder_in_cpu_mode(decoder, Checkpoint(spec.plan.model))

    thinker = ThinkerEngine(config, NxdiThinkerSlots(graphs("thinker"), config), media)
    if config.talker is None or config.code2wav is None:
        return Engines(thinker, None, None)
    talker = talker_engine(host, spec, NxdiSlots(graphs("talker")))
    return Engines(thinker, talker, vocoder_engine(host, spec))


def decoder_in_cpu_mode(spec: DecoderSpec, checkpoint: Checkpoint) -> "CpuModeDecoder":
    """Load this rank's share of a decoder.

    Raises RuntimeError (see join_ranks), and ValueError for bfloat16 over several
    ranks, which gloo can't add up.
    """
    from testing.neuron.cpu_mode_decoder import CpuModeDecoder

    decoder = CpuModeDecoder(spec, checkpoint)
    decoder.load_weights_here()
    return decoder
