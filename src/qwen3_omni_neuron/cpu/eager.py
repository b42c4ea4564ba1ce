"""All engines in torch, over the modules of model/."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu.encoders import CpuAudio, CpuVision
from qwen3_omni_neuron.cpu.slots import CpuSlots, media_rows, talker_tables
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.engines.inputs import sampling_arrays
from qwen3_omni_neuron.engines.media import MediaEncoders, PromptMedia
from qwen3_omni_neuron.engines.protocols import DecoderSlots, PredictorSampling, StageEngines
from qwen3_omni_neuron.engines.talker import TalkerEngine
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.model.code2wav import Code2Wav, State
from qwen3_omni_neuron.model.code_predictor import CodePredictor, top_p_limits
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.kv_cache import PromptCache, SlotCache
from qwen3_omni_neuron.model.talker import TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel


def eager_engines(models: Models, spec: EngineSpec) -> StageEngines:
    """Build the engines of the stages that `models` has."""
    plan, c, built = spec.plan, spec.config, StageEngines()
    slots, kept = plan.max_concurrency, spec.dtype
    if models.thinker is not None:
        built["encoder"] = encoder = media_encoders(models, spec)
        of_thinker = c.thinker.text, models.thinker, slots, plan.context_length
        built["thinker"] = ThinkerEngine(c, EagerThinkerSlots(*of_thinker, kept), encoder)
    if models.talker is not None:
        assert c.talker
        of_talker = c.talker.text, models.talker, slots, plan.talker_context_length
        built["talker"] = talker_engine(models, spec, EagerSlots(*of_talker, kept))
    if models.code2wav is not None:
        built["vocoder"] = vocoder_engine(models, spec)
    return built


def media_encoders(models: Models, spec: EngineSpec) -> MediaEncoders:
    """Build the thinker's audio and vision encoder."""
    assert models.audio_encoder and models.vision_encoder
    audio = CpuAudio(models.audio_encoder)
    vision = CpuVision(models.vision_encoder, spec.plan.patch_buckets)
    return MediaEncoders(spec.config, audio, vision, spec.dtype)


def talker_engine(models: Models, spec: EngineSpec, decoder: DecoderSlots) -> TalkerEngine:
    """Build the talker over its decoder, which may run elsewhere."""
    c = spec.config.talker
    assert c and models.code_predictor and models.hidden_projection
    arithmetic = getattr(torch, spec.plan.predictor_arithmetic)
    predictor = EagerPredictor(models.code_predictor, arithmetic)
    tables, project_hidden = talker_tables(models, spec), models.hidden_projection
    return TalkerEngine(spec.config, decoder, predictor, *tables, project_hidden, spec.newline_id)


def vocoder_engine(models: Models, spec: EngineSpec) -> CpuVocoder:
    """Build the vocoder."""
    assert models.code2wav
    calls = EagerCode2Wav(models.code2wav)
    return CpuVocoder(calls, spec.plan.max_concurrency, spec.plan.chunk_frames)


class EagerSlots(CpuSlots):
    """CpuSlots of a thinker or a talker of model/."""

    def __init__(
        self,
        config: DecoderConfig,
        model: ThinkerModel | TalkerModel,
        slots: int,
        context_length: int,
        dtype: torch.dtype,
    ):
        super().__init__(config, slots, context_length, dtype)
        self._model = model

    def prefill(
        self,
        slot: int,
        rows: Tensor,
        positions: Tensor,
        *,
        start: int = 0,
        deepstack: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Append rows to a slot's first `start` rows, by the model's `prefill`."""
        self._drop(slot, start + len(rows))
        self._begin(slot, start)
        window = self._cache.slots(slot, slot + 1).window(start + len(rows))
        last, cache = torch.tensor([len(rows) - 1]), PromptCache(window, start)
        extra = {} if deepstack is None else {"deepstack": deepstack}
        outputs = self._model.prefill(rows, positions, last, cache, **extra)
        self._end(slot, start + len(rows), float(positions.max()))
        return outputs

    def step(self, slots: Sequence[int], inputs: Tensor) -> Any:
        """Append one row to each slot. inputs: token ids int64 [n] or embeddings [n, hidden]."""
        lengths, positions = self._ends(slots)
        cache = SlotCache(
            self._cache.window(max(lengths) + 1), torch.tensor(slots), torch.tensor(lengths)
        )
        outputs = self._model.decode(inputs, torch.tensor(positions), cache)
        self._count_step(slots)
        return outputs


class EagerThinkerSlots(EagerSlots):
    """The thinker's slots (see engines.protocols.ThinkerSlots)."""

    _model: ThinkerModel

    @torch.inference_mode()
    def prefill_tokens(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.float32],
        start: int,
        media: PromptMedia | None,
        accepted: NDArray[np.bool_],
    ) -> tuple[Tensor, Tensor]:
        """See ThinkerSlots.prefill_tokens."""
        rows = media_rows(self._model, torch.from_numpy(token_ids), media)
        added = None if media is None else media.added()
        places = torch.from_numpy(positions)
        logits, states = self.prefill(slot, rows, places, start=start, deepstack=added)
        return logits, states[torch.from_numpy(accepted)]

    @torch.inference_mode()
    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """See ThinkerSlots.step_tokens."""
        logits: Tensor = self.step(slots, torch.tensor(token_ids))
        return logits


class EagerPredictor:
    """The code predictor of model/. arithmetic: dtype of its computation."""

    def __init__(self, predictor: CodePredictor, arithmetic: torch.dtype = torch.float32):
        self._predictor, self._arithmetic = predictor, arithmetic

    @torch.inference_mode()
    def predict(
        self,
        slots: Sequence[int],
        code0: Sequence[int],
        sampling: Sequence[PredictorSampling],
        hidden: Tensor,
        feedback: Tensor,
    ) -> Tensor:
        """See Predictor.predict."""
        steps, vocabulary, _ = self._predictor.head.shape
        rows = list(slots)
        given = hidden[rows].to(self._arithmetic), torch.tensor(code0)
        if all(frame.noise is None for frame in sampling):
            codes, feedback[rows] = self._predictor(*given)
            return codes
        noise, top_p, top_k = sampling_arrays(sampling, steps, vocabulary)
        limits = torch.tensor([min(k or vocabulary, vocabulary) for k in top_k])
        how = torch.from_numpy(noise), top_p_limits(top_p), int(limits.max())
        codes, feedback[rows] = self._predictor(*given, *how, top_k_limits=limits)
        return codes


class EagerCode2Wav:
    """Code2WavCalls of cpu.vocoder. State tensors' first axis is streams."""

    def __init__(self, code2wav: Code2Wav):
        self._code2wav, self.config = code2wav, code2wav.config

    @torch.inference_mode()
    def start(self, codes: Tensor) -> tuple[Tensor, State]:
        """See Code2WavCalls.start."""
        return self._code2wav.start(codes)

    @torch.inference_mode()
    def step(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        """See Code2WavCalls.step."""
        return self._code2wav.step(codes, state)

    def join(self, states: Sequence[State]) -> State:
        """See Code2WavCalls.join."""
        if len(states) == 1:
            return states[0]
        return tuple(torch.cat(parts) for parts in zip(*states, strict=True))

    def split(self, state: State) -> Sequence[State]:
        """See Code2WavCalls.split."""
        return list(zip(*(tensor.split(1) for tensor in state), strict=True))
