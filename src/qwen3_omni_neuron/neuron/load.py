"""From a checkpoint to engines over NxDI."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_omni_neuron.buckets import buckets_within
from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.config import DecoderConfig
from qwen3_omni_neuron.cpu.load import (
    EngineSpec,
    media_encoders,
    talker_engine,
    vocoder_engine,
)
from qwen3_omni_neuron.cpu.slots import talker_context_length
from qwen3_omni_neuron.loading import load_host_models
from qwen3_omni_neuron.neuron.decoder_weights import DecoderWeights
from qwen3_omni_neuron.neuron.plan import DecoderPlan
from qwen3_omni_neuron.neuron.slots import DecoderGraphs, NxdiSlots
from qwen3_omni_neuron.neuron.thinker import NeuronThinker
from qwen3_omni_neuron.runtime.protocols import Engines
from qwen3_omni_neuron.weights import Piece, talker_pieces, thinker_pieces

if TYPE_CHECKING:  # NxDI is imported only where a decoder is built
    from qwen3_omni_neuron.neuron.nxdi_config import DecoderInferenceConfig


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
    """The thinker's text decoder, which captures the accept layer."""
    from qwen3_omni_neuron.neuron.nxdi_config import Capture, inference_config

    config = spec.engine.config
    c = config.thinker.text
    accept_layer = config.talker.accept_hidden_layer if config.talker else 0
    # hidden_states[n] as the reference counts them is what layer n - 1 puts out, and
    # hidden_states[0] what layer 0 takes.
    capture = Capture(f"layers.{max(0, accept_layer - 1)}", output=accept_layer > 0)
    plan = _plan(spec, spec.engine.context_length)
    layers = len(config.thinker.vision.deepstack_layers)
    inference = inference_config(c, plan, capture, takes_rows=False, deepstack_layers=layers)
    return _loaded(spec, inference, c, plan, thinker_pieces(config.thinker))


def talker_graphs(spec: NeuronSpec) -> DecoderGraphs:
    """The talker's decoder, which captures what its head takes: the last row, normed."""
    from qwen3_omni_neuron.neuron.nxdi_config import Capture, inference_config

    assert spec.engine.config.talker is not None
    config = spec.engine.config.talker
    plan = _plan(spec, talker_context_length(config, spec.engine.context_length))
    inference = inference_config(
        config.text, plan, Capture("lm_head", output=False), takes_rows=True
    )
    return _loaded(spec, inference, config.text, plan, talker_pieces(config))


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


def _loaded(
    spec: NeuronSpec,
    inference: "DecoderInferenceConfig",
    c: DecoderConfig,
    plan: DecoderPlan,
    ours: Iterable[tuple[str, list[Piece]]],
) -> DecoderGraphs:
    from qwen3_omni_neuron.neuron.application import DecoderApplication

    weights = DecoderWeights(Checkpoint(spec.engine.folder), c, list(ours))
    application = DecoderApplication(inference, plan, weights)
    application.load_in_cpu_mode()
    return application
