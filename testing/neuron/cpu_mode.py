"""Engines over NxDI's CPU mode, which runs NxDI's own modules without a device.

Thinker and talker are NxDI's; encoders, code predictor, projections and vocoder run model/ on the
CPU.
"""

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import load_host_models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu.build import media_encoders, talker_engine, vocoder_engine
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.neuron.engines.thinker import NeuronThinker
from qwen3_omni_neuron.neuron.nxdi.plan import decoder_plan
from qwen3_omni_neuron.neuron.nxdi.slots import DecoderGraphs, NxdiSlots
from qwen3_omni_neuron.neuron.nxdi.spec import decoder_application


def build_cpu_mode_engines(spec: EngineSpec) -> Engines:
    """Build the engines of all stages.

    With tp over 1 every rank builds the same engines, and makes the same calls in the same order:
    the pipeline's threads do not, so it runs with 1.
    Raises CheckpointError (see checkpoint.parameters.load_parts), RuntimeError (see
    neuron.nxdi.application.join_ranks), and ValueError for bfloat16 with tp over 1.
    """
    config = spec.config
    host = load_host_models(Checkpoint(spec.plan.model), config, spec.dtype)
    media = media_encoders(host, spec)
    thinker = NeuronThinker(
        config, NxdiSlots(decoder_in_cpu_mode(spec, "thinker")), media, spec.dtype
    )
    if config.talker is None or config.code2wav is None:
        return Engines(thinker, None, None)
    talker = talker_engine(host, spec, NxdiSlots(decoder_in_cpu_mode(spec, "talker")))
    return Engines(thinker, talker, vocoder_engine(host, spec))


def decoder_in_cpu_mode(spec: EngineSpec, part: str) -> DecoderGraphs:
    """Load "thinker" or "talker" in CPU mode. Raises as build_cpu_mode_engines."""
    plan = decoder_plan(spec.plan, part, on_cpu=True)
    application = decoder_application(part, Checkpoint(spec.plan.model), spec.config, plan)
    application.load_in_cpu_mode()
    return application
