"""Modules of model/: created on the meta device, then filled from a checkpoint."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.names import (
    audio_encoder_pieces,
    code2wav_pieces,
    code_predictor_pieces,
    codec_embedding_pieces,
    embedding_pieces,
    projection_pieces,
    talker_pieces,
    thinker_pieces,
    vision_encoder_pieces,
)
from qwen3_omni_neuron.checkpoint.parameters import Part, load_parts, put_parameter
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import Code2WavConfig, OmniConfig, TalkerConfig
from qwen3_omni_neuron.model.moe import SCALE, MoeFeedForward
from qwen3_omni_neuron.model.talker import ResizeMlp, TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder

STAGES = ("thinker", "talker", "vocoder")


@dataclass
class Models:
    """Modules of model/ by name, None if not requested.

    embedding: the thinker's, projected to the talker's text rows. codec_embedding: the talker's.
    """

    thinker: ThinkerModel | None = None
    audio_encoder: AudioEncoder | None = None
    vision_encoder: VisionEncoder | None = None
    embedding: nn.Embedding | None = None
    talker: TalkerModel | None = None
    codec_embedding: nn.Embedding | None = None
    text_projection: ResizeMlp | None = None
    hidden_projection: ResizeMlp | None = None
    code_predictor: CodePredictor | None = None
    code2wav: Code2Wav | None = None


def load_tables(checkpoint: Checkpoint, config: OmniConfig, dtype: torch.dtype) -> Models:
    """Read the token embedding and the codec embedding only.

    Raises CheckpointError; see checkpoint.parameters.load_parts.
    """
    models = Models()
    with torch.device("meta"), _NoInit():
        parts = _embedding_parts(models, config)
        if config.talker is not None:
            parts |= _codec_embedding_parts(models, config.talker)
    load_parts(parts.values(), checkpoint, dtype)
    return models


def lay_out(config: OmniConfig, stages: Collection[str] = STAGES) -> tuple[Models, dict[str, Part]]:
    """Create some stages' modules on the meta device.

    Returns the modules, and their Parts by names in Models, without a missing talker or vocoder.
    """
    models = Models()
    parts: dict[str, Part] = {}
    with torch.device("meta"), _NoInit():
        if "thinker" in stages:
            parts |= _thinker_parts(models, config)
        if "talker" in stages and config.talker is not None:
            parts |= _talker_parts(models, config, config.talker)
        if "vocoder" in stages and config.code2wav is not None:
            parts |= _vocoder_parts(models, config.code2wav)
    return models, parts


def fill(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace a module's parameters and buffers by these tensors, without a copy."""
    for name, tensor in tensors:
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        if attribute in dict(holder.named_parameters(recurse=False)):
            put_parameter(module, name, tensor.detach())
        else:
            setattr(holder, attribute, tensor)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a module's parameters, except int8 experts, their scales, and buffers."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            is_scale = isinstance(owner, MoeFeedForward) and name.endswith(SCALE)
            if parameter.dtype != torch.int8 and not is_scale:
                parameter.data = parameter.data.to(dtype)


class _NoInit(TorchFunctionMode):
    """Mode in which torch's initializers do nothing.

    On the meta device they import torch's compiler, which takes a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def _thinker_parts(models: Models, config: OmniConfig) -> dict[str, Part]:
    c = config.thinker
    accept_layer = config.talker.accept_hidden_layer if config.talker else 0
    models.thinker = ThinkerModel(c, accept_layer)
    models.embedding = models.thinker.embedding
    prefixes = ("thinker.model.", "thinker.lm_head.")
    thinker = Part(models.thinker, list(thinker_pieces(c)), prefixes)
    return {"thinker": thinker} | _encoder_parts(models, config)


def _encoder_parts(models: Models, config: OmniConfig) -> dict[str, Part]:
    c = config.thinker
    models.audio_encoder = AudioEncoder(c.audio)
    models.vision_encoder = VisionEncoder(c.vision)
    audio, vision = list(audio_encoder_pieces(c.audio)), list(vision_encoder_pieces(c.vision))
    return {
        "audio_encoder": Part(models.audio_encoder, audio, ("thinker.audio_tower.",)),
        "vision_encoder": Part(models.vision_encoder, vision, ("thinker.visual.",)),
    }


def _embedding_parts(models: Models, config: OmniConfig) -> dict[str, Part]:
    text = config.thinker.text
    models.embedding = nn.Embedding(text.vocab_size, text.hidden_size)
    return {"embedding": Part(models.embedding, list(embedding_pieces()), ())}


def _codec_embedding_parts(models: Models, c: TalkerConfig) -> dict[str, Part]:
    models.codec_embedding = nn.Embedding(c.text.vocab_size, c.text.hidden_size)
    return {"codec_embedding": Part(models.codec_embedding, list(codec_embedding_pieces()), ())}


def _talker_parts(models: Models, config: OmniConfig, c: TalkerConfig) -> dict[str, Part]:
    embedding = {} if models.embedding is not None else _embedding_parts(models, config)
    models.talker = TalkerModel(c)
    models.codec_embedding = models.talker.codec_embedding
    talker = Part(models.talker, list(talker_pieces(c)), ("talker.",))
    return embedding | {"talker": talker} | _projection_and_predictor_parts(models, c)


def _projection_and_predictor_parts(models: Models, c: TalkerConfig) -> dict[str, Part]:
    assert models.codec_embedding is not None
    models.text_projection, models.hidden_projection = ResizeMlp(c), ResizeMlp(c)
    models.code_predictor = CodePredictor(c, models.codec_embedding)
    parts = {
        name: Part(getattr(models, name), list(projection_pieces(name)), ())
        for name in ("text_projection", "hidden_projection")
    }
    predictor = Part(models.code_predictor, list(code_predictor_pieces(c)), ())
    return parts | {"code_predictor": predictor}


def _vocoder_parts(models: Models, c: Code2WavConfig) -> dict[str, Part]:
    models.code2wav = Code2Wav(c)
    return {"code2wav": Part(models.code2wav, list(code2wav_pieces(c)), ("code2wav.",))}
