"""Modules of model/ with a checkpoint's weights, in plain torch and one dtype."""

from collections.abc import Collection

import torch

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, Models, lay_out
from qwen3_omni_neuron.checkpoint.names import codec_embedding_pieces, embedding_pieces
from qwen3_omni_neuron.checkpoint.parameters import Part, load_parts
from qwen3_omni_neuron.model.config import OmniConfig


def load_models(
    checkpoint: Checkpoint, config: OmniConfig, dtype: torch.dtype, stages: Collection[str] = STAGES
) -> Models:
    """Read the weights of some stages once, converted to `dtype` as they are copied.

    Talker and vocoder are left out where the checkpoint has none. Raises CheckpointError; see
    checkpoint.parameters.load_parts.
    """
    models, parts = lay_out(config, stages)
    load_parts(parts.values(), checkpoint, dtype)
    return models


def load_host_models(checkpoint: Checkpoint, config: OmniConfig, dtype: torch.dtype) -> Models:
    """Load all models but the decoders of thinker and talker, which run elsewhere; see load_models.

    The decoders' embeddings are loaded, too.
    """
    models, parts = lay_out(config)
    del parts["thinker"]
    assert models.embedding is not None
    parts["embedding"] = Part(models.embedding, list(embedding_pieces()), ())
    if parts.pop("talker", None) is not None:
        assert models.codec_embedding is not None
        parts["codec_embedding"] = Part(models.codec_embedding, list(codec_embedding_pieces()), ())
    models.thinker = models.talker = None
    load_parts(parts.values(), checkpoint, dtype)
    return models
