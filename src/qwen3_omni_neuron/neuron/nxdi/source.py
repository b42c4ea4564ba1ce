"""Where a decoder's weights come from: one checkpoint, read whole or cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.names import Piece, talker_pieces, thinker_pieces
from qwen3_omni_neuron.checkpoint.tensor_file import layout_bytes
from qwen3_omni_neuron.graphs.parallel.experts import expert_multiple
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.neuron.nxdi.plan import DecoderPlan
from qwen3_omni_neuron.neuron.nxdi.shards import shard_layout, write_decoder_shards
from qwen3_omni_neuron.neuron.nxdi.weights import State, nxdi_pieces, nxdi_state, rank_state

if TYPE_CHECKING:  # NxDI is imported only where a decoder is built
    pass


@dataclass(frozen=True)
class DecoderWeights:
    """ours: the pieces of our thinker or talker (see weights.thinker_pieces)."""

    checkpoint: Checkpoint
    c: DecoderConfig
    ours: Sequence[tuple[str, list[Piece]]]

    @staticmethod
    def of(part: str, checkpoint: Checkpoint, config: OmniConfig) -> "DecoderWeights":
        """part: "thinker" or "talker"."""
        if part == "thinker":
            return DecoderWeights(
                checkpoint, config.thinker.text, list(thinker_pieces(config.thinker))
            )
        assert config.talker is not None
        return DecoderWeights(checkpoint, config.talker.text, list(talker_pieces(config.talker)))

    def whole(self, plan: DecoderPlan) -> State:
        """All of it, by NxDI's names, for its CPU mode. Raises CheckpointError."""
        state = nxdi_state(nxdi_pieces(self.ours), self.c, self.checkpoint, plan.dtype)
        return state | rank_state(self.c.layers, plan.tp)

    def write_shards(self, folder: Path, plan: DecoderPlan, takes_rows: bool) -> None:
        """As decoder_shards.write_decoder_shards."""
        write_decoder_shards(
            folder,
            self.checkpoint,
            nxdi_pieces(self.ours),
            self.c,
            plan.dtype,
            plan.tp,
            takes_rows,
            expert_multiple(plan.profile),
        )

    def shard_bytes(self, plan: DecoderPlan, takes_rows: bool) -> int:
        """Of the files of all cores, but for their headers."""
        names = [name for name, _ in nxdi_pieces(self.ours)]
        multiple = expert_multiple(plan.profile)
        layout = shard_layout(names, self.c, plan.dtype, plan.tp, takes_rows, multiple)
        return plan.tp * layout_bytes(layout)
