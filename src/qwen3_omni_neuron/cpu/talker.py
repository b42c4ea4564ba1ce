"""Tables of the talker's rows on the CPU."""

from torch import Tensor

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.talker import ROWS_AT_ONCE, TextRows


def talker_tables(models: Models, spec: EngineSpec) -> tuple[Tensor, TextRows]:
    """Return the codec's table [codec vocab, hidden] and the rows of text tokens."""
    assert spec.config.talker and models.codec_embedding
    assert models.embedding and models.text_projection
    table, width = models.embedding.weight.detach(), spec.config.talker.text.hidden_size
    text_rows = TextRows(table, models.text_projection, width, spec.dtype)
    if len(table) <= ROWS_AT_ONCE:
        text_rows.fill()  # in one call now, so that no frame waits for a row
    return models.codec_embedding.weight.detach().to(spec.dtype), text_rows
