"""Vision encoder: patches of images in, thinker rows and deepstack features out.

An image is one frame, and so are two successive images of a video. Attention stays within a frame,
so frames are rows of one batch. A frame's patches come in blocks of 2 x 2, each of which becomes
one thinker row:

    0  1   4  5
    2  3   6  7
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import VisionEncoderConfig
from qwen3_omni_neuron.model.layers import Attend, cut, widen
from qwen3_omni_neuron.model.rotary import Rotation, apply_rotary

NORM_EPS = 1e-6


class VisionEncoder(nn.Module):
    """Transformer over the patches of each frame, then mergers of 2 x 2 patches.

    Source: transformers Qwen3OmniMoeVisionEncoder.forward.
    """

    frequencies: Tensor

    def __init__(self, c: VisionEncoderConfig):
        super().__init__()
        self.config = c
        self.patch_embedding = nn.Linear(c.patch_values, c.hidden_size)
        self.position_embedding = nn.Embedding(c.positions_per_side**2, c.hidden_size)
        # Half of a head's angles follow the patch's row, half its column.
        steps = torch.arange(0, c.head_dim // 2, 2, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / (c.rope_theta ** (steps / (c.head_dim // 2)))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.layers = nn.ModuleList(VisionLayer(c) for _ in range(c.layers))
        self.merger = PatchMerger(c, norm_merged=False)
        self.deepstack_mergers = nn.ModuleList(
            PatchMerger(c, norm_merged=True) for _ in c.deepstack_layers
        )

    def forward(
        self,
        patches: Tensor,
        places: Tensor,
        grid: Tensor,
        valid: Tensor,
        attend: Attend | None = None,
    ) -> Tensor:
        """Encode independent frames of one grid.

        patches: [frames, P, patch_values]; places: int64 [2, P], each patch's row and column; grid:
        int64 [2], a frame's rows and columns; valid: bool [P], True for real patches, which come
        first. P is a multiple of merge_size**2. attend: replaces the layers' own. Returns [1 +
        deepstack layers, frames, P / merge_size**2, output_size]: the thinker's rows, then each
        deepstack layer's features.
        """
        position = self._positions(places, grid)
        x = self.patch_embedding(patches)
        x = x + position.to(x.dtype)
        rotation = self._rotation(places)
        mask = valid[None, None, None, :]
        others = () if attend is None else (attend,)
        stacked = []
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, mask, *others)
            if index in self.config.deepstack_layers:
                merger = self.deepstack_mergers[self.config.deepstack_layers.index(index)]
                stacked.append(merger(x))
        return torch.stack((self.merger(x), *stacked))

    def _positions(self, places: Tensor, grid: Tensor) -> Tensor:
        """Interpolate the learned square of positions over the grid: [P, hidden], in float32.

        Bilinear, with aligned corners; float64 for a float64 model.
        """
        side = self.config.positions_per_side
        last = (grid - 1).clamp(min=1)[:, None]
        exact = places.float() * (side - 1) / last  # [2, P]
        low = exact.floor()
        share = exact - low  # weight of the higher neighbour
        nearest = (
            torch.stack((low, low + 1)).to(places.dtype).clamp(max=side - 1)
        )  # [2 (low, high), 2, P]
        weights = torch.stack((1 - share, share))
        rows, columns = nearest[:, 0], nearest[:, 1]
        # [row neighbour, column neighbour, P]
        index = rows[:, None] * side + columns[None]
        weight = (weights[:, None, 0] * weights[None, :, 1]).unsqueeze(-1)
        return (widen(self.position_embedding(index)) * weight).sum((0, 1))

    def _rotation(self, places: Tensor) -> Rotation:
        """Return cos and sin [P, 1, head_dim]: angles of row, then column, twice."""
        angles = (places.t()[:, :, None] * self.frequencies).flatten(1)  # [P, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)


class VisionLayer(nn.Module):
    """Pre-norm transformer layer.

    Source: transformers Qwen3OmniMoeVisionBlock.forward.
    """

    def __init__(self, c: VisionEncoderConfig):
        super().__init__()
        self.heads = c.heads
        self.attention_norm = nn.LayerNorm(c.hidden_size, eps=NORM_EPS)
        self.qkv = nn.Linear(c.hidden_size, 3 * c.hidden_size)
        self.out = nn.Linear(c.hidden_size, c.hidden_size)
        self.ffn_norm = nn.LayerNorm(c.hidden_size, eps=NORM_EPS)
        self.fc1 = nn.Linear(c.hidden_size, c.ffn_width)
        self.fc2 = nn.Linear(c.ffn_width, c.hidden_size)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        mask: Tensor,
        attend: Attend = F.scaled_dot_product_attention,
    ) -> Tensor:
        """Apply the layer to x [frames, P, hidden]. mask: bool [1, 1, 1, P], real patches."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (3 * self.heads, -1))
        qk, v = cut(qkv, 2, 2 * self.heads)  # [frames, P, heads, head_dim]
        qk = apply_rotary(widen(qk), rotation).to(x.dtype)
        q, k = cut(qk, 2, self.heads)
        mixed = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.fc1(self.ffn_norm(x)), approximate="tanh")
        return x + self.fc2(hidden)


class PatchMerger(nn.Module):
    """Feed-forward from 2 x 2 patches to one row.

    norm_merged: the norm is over the four patches together.
    Source: transformers Qwen3OmniMoeVisionPatchMerger.forward.
    """

    def __init__(self, c: VisionEncoderConfig, norm_merged: bool):
        super().__init__()
        self.patches, self.norm_merged = c.merge_size**2, norm_merged
        width = c.hidden_size * self.patches
        self.norm = nn.LayerNorm(width if norm_merged else c.hidden_size, eps=NORM_EPS)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, c.output_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [frames, P, hidden] to [frames, P / merge_size**2, output_size]."""
        if not self.norm_merged:
            x = self.norm(x)
        x = x.unflatten(1, (-1, self.patches)).flatten(2)
        if self.norm_merged:
            x = self.norm(x)
        return self.fc2(F.gelu(self.fc1(x)))


def patch_places(height: int, width: int, merge_size: int) -> Tensor:
    """Return a frame's patches' rows and columns, block by block: int64 [2, height * width]."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    # [2, block rows, rows, block columns, columns] -> [2, block rows, block columns, rows, columns]
    blocks = torch.stack((rows, columns)).unflatten(2, (-1, merge_size))
    return blocks.unflatten(1, (-1, merge_size)).transpose(2, 3).flatten(1)


def pad_patches(frames: Tensor, places: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad frames with zeros to `bucket` patches each.

    frames: [frames, P, patch_values]; places: int64 [2, P]. Returns both, and valid, bool
    [bucket], for `VisionEncoder.forward`.
    """
    missing = bucket - frames.shape[1]
    valid = torch.arange(bucket) < frames.shape[1]
    if missing:  # F.pad always copies
        frames, places = F.pad(frames, (0, 0, 0, missing)), F.pad(places, (0, missing))
    return frames, places, valid
