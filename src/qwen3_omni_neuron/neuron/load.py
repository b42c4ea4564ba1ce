"""From a checkpoint to engines over NxDI."""

from dataclasses import dataclass

from qwen3_omni_neuron.buckets import buckets_within
from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.cpu.load import (
    EngineSpec,
    media_encoders,
    talker_engine,
    vocoder_engine,
)
from qwen3_omni_neuron.cpu.slots import talker_context_length
from qwen3_omni_neuron.loading import load_host_models
from qwen3_omni_neuron.neuron.decoders import talker_application, thinker_application
from qwen3_omni_neuron.neuron.plan import DecoderPlan
from qwen3_omni_neuron.neuron.slots import DecoderGraphs, NxdiSlots
from qwen3_omni_neuron.neuron.thinker import NeuronThinker
from qwen3_omni_neuron.runtime.protocols import Engines


@dataclass(frozen=True)
class NeuronSpec:
    """What engines over NxDI are built from, beside what every engine is.

    tp: how many cores, or in CPU mode processes, share each weight. decode_buckets: positions that
    a decode step looks back on are padded to these, ascending; none: always all of them.
    batches: rows of the decode graphs (see DecoderPlan).
    """

    engine: EngineSpec
    tp: int
    decode_buckets: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()


def build_cpu_mode_engines(spec: NeuronSpec) -> Engines:
    """Thinker and talker over NxDI's CPU mode, which runs its modules without a device; encoders,
    code predictor, projections and vocoder over model/ on the CPU.

    With tp over 1 every rank builds the same engines, and makes the same calls in the same order:
    the pipeline's threads do not, so it runs with 1.
    Raises CheckpointError (see weights.load_parts), RuntimeError (see application.join_ranks), and
    ValueError for bfloat16 with tp over 1.
    """
    config = spec.engine.config
    host = load_host_models(Checkpoint(spec.engine.folder), config, spec.engine.dtype)
    media = media_encoders(host, spec.engine)
    thinker = NeuronThinker(config, NxdiSlots(thinker_graphs(spec)), media, spec.engine.dtype)
    if config.talker is None or config.code2wav is None:
        return Engines(thinker, None, None)
    talker = talker_engine(host, spec.engine, NxdiSlots(talker_graphs(spec)))
    return Engines(thinker, talker, vocoder_engine(host, spec.engine))


def thinker_graphs(spec: NeuronSpec) -> DecoderGraphs:
    """The thinker's text decoder in CPU mode."""
    plan = _plan(spec, spec.engine.context_length)
    checkpoint = Checkpoint(spec.engine.folder)
    application = thinker_application(checkpoint, spec.engine.config, plan)
    application.load_in_cpu_mode()
    return application


def talker_graphs(spec: NeuronSpec) -> DecoderGraphs:
    """The talker's decoder in CPU mode."""
    assert spec.engine.config.talker is not None
    context_length = talker_context_length(spec.engine.config.talker, spec.engine.context_length)
    plan = _plan(spec, context_length)
    application = talker_application(Checkpoint(spec.engine.folder), spec.engine.config, plan)
    application.load_in_cpu_mode()
    return application


def _plan(spec: NeuronSpec, context_length: int) -> DecoderPlan:
    """Buckets of a decoder: those of the spec that are shorter than its context, and that."""
    return DecoderPlan(
        spec.tp,
        spec.engine.slots,
        context_length,
        buckets_within(context_length, spec.engine.prompt_buckets or (context_length,)),
        buckets_within(context_length, spec.decode_buckets or (context_length,)),
        spec.engine.dtype,
        on_cpu=True,
        batches=spec.batches,
    )
