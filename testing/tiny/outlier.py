"""Random weights with the activations that were published for the real code predictor.

There an activation reaches about 49,000 after the MLP of layer 2, counted from 0, about 600 times
the others; later layers cancel it; act(gate) * up overflows float16 in layer 2; codes are chosen by
margins down to 0.06; the talker's hidden states span -39.5 to 72.4 (openvinotoolkit/openvino.genai,
pull request 4187, and NVIDIA's TensorRT-Edge-LLM). Random weights lack it.

Here channel 0 of the predictor's residual gets the outlier, the same for every row: RMSNorm makes
the squares of a row's numbers add up to their count, and two inner channels of an MLP compute a
square, since silu(z) z + silu(-z) (-z) is z * z. While the outlier is there, channel 0 of a norm is
nearly constant, and a few inner channels of the last two MLPs subtract it. Their norms take the
other channels, which the outlier makes small, back to their size.
"""

from functools import cache

import torch
from torch import Tensor

from testing.tiny.sizes import Size
from testing.tiny.weights import Config, Weights, random_weights

OUTLIER = 49_000.0
LAYERS, LAYER = 5, 2  # the predictor's layers, as released, and the one whose MLP makes the outlier
SHARES = {3: 0.6, 4: 0.4}  # what each later layer cancels
CANCELLING = 8  # inner channels that do so in a layer
OTHERS = 82.0  # the other channels' root mean square after that layer: OUTLIER / 597
# Gains of what the layers add to their input, by which the others reach that.
LAYER_GAINS = (30.0, 60.0, 60.0, 60.0, 60.0)
# Least gain of the inner channels that compute squares: a row's largest square overflows float16.
LEAST_STEEPNESS = 100.0
HEAD_GAIN = 2.5  # the least margin of a frame's 15 codes is then about 0.06 in the median
# The talker's last norm multiplies its channels by the first, and one of them by the second.
TALKER_GAIN, WIDEST_GAIN = 4.0, 16.0

_PREDICTOR = "talker.code_predictor."
_LAYER = _PREDICTOR + "model.layers.{}."


def with_outlier_layers(size: Size) -> Size:
    """Return a size whose code predictor has the released number of layers."""
    talker = size.get("talker_config", {})
    layers = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    predictor = {**talker.get("code_predictor_config", {}), **layers}
    return {**size, "talker_config": {**talker, "code_predictor_config": predictor}}


def outlier_weights(seed: int) -> Weights:
    """Return random weights from a seed, with the outlier; for sizes of `with_outlier_layers`.

    The code predictor's MLP has to be twice as wide as its hidden states, or wider.
    """
    draw = random_weights(seed)

    def drawn(config: Config, name: str, parameter: Tensor) -> Tensor:
        filled = torch.empty_like(parameter)
        draw(config, name, filled)
        return filled

    planted = cache(_Planted)

    def weights(config: Config, name: str, parameter: Tensor) -> None:
        draw(config, name, parameter)
        if name in ("talker.model.norm.weight", "talker.codec_head.weight"):
            gains = torch.full(parameter.shape[-1:], TALKER_GAIN)
            gains[1] = WIDEST_GAIN
            parameter *= gains if "norm" in name else 1 / gains
        elif name.startswith(_PREDICTOR + "lm_head."):
            parameter *= HEAD_GAIN
        elif name.startswith(_PREDICTOR + "model.layers."):
            c = config["talker_config"]["code_predictor_config"]
            hidden, width = c["hidden_size"], c["intermediate_size"]
            assert c["num_hidden_layers"] == LAYERS and width >= 2 * hidden
            norm = _LAYER.format(LAYER) + "post_attention_layernorm.weight"
            of_norm = drawn(config, norm, torch.empty(hidden, dtype=parameter.dtype))
            values = planted(seed, width, of_norm.dtype, tuple(of_norm.tolist()))
            values.put(name.removeprefix(_PREDICTOR + "model.layers."), parameter)

    return weights


class _Planted:
    """The planted numbers of one predictor, all float64 but exact in the checkpoint's dtype.

    norm: weights of the norm before the MLP that makes the outlier.
    """

    def __init__(self, seed: int, width: int, dtype: torch.dtype, norm: tuple[float, ...]):
        self._hidden = hidden = len(norm)
        self._dtype = dtype
        generator = torch.Generator().manual_seed(seed)
        steep = LEAST_STEEPNESS * (1 + torch.rand(hidden, generator=generator).double())
        weights = torch.tensor(norm, dtype=torch.float64)
        self._sizes = self._exact(steep / weights)
        squares = (self._sizes * weights).square()
        self._makes = self._exact(OUTLIER / hidden / squares)
        left = reached = float((self._makes * squares).sum())
        self._places = torch.arange(CANCELLING) * (width // CANCELLING)
        self._boosts, self._inner, self._cancels = {}, {}, {}
        # Channel 0 of a norm's weights: its inverse, were there no other channels.
        self._unit = float(self._exact(torch.tensor(hidden**-0.5)))
        for layer, share in SHARES.items():
            others = OTHERS * hidden**0.5 / left
            self._boosts[layer] = left / hidden**0.5 / OTHERS
            channel = self._unit * (hidden / (1 + others**2)) ** 0.5
            gates = self._exact(8 + 8 * torch.rand(2, CANCELLING, generator=generator))
            gate, up = (gates * channel).double()
            inner = torch.nn.functional.silu(gate) * up
            parts = 0.5 + torch.rand(CANCELLING, generator=generator).double()
            parts, goal = share * reached * parts / parts.sum(), share * reached
            down = self._exact(-parts / inner)
            # The last ones subtract what rounding to the dtype left of the others.
            for k in (-2, -1):
                down[k] = 0
                rest = goal + float((down * inner)[: k or None].sum())
                share_of_it = 0.5 if k == -2 else 1.0
                down[k] = self._exact(torch.tensor(-share_of_it * rest / float(inner[k])))
            self._inner[layer], self._cancels[layer] = gates, down
            left += float((down * inner).sum())

    def put(self, name: str, parameter: Tensor) -> None:
        """Change a drawn parameter of a layer, named from the layer's number on, in place."""
        number, _, part = name.partition(".")
        layer, hidden, places = int(number), self._hidden, self._places
        if part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            parameter *= LAYER_GAINS[layer]
        if part.endswith("layernorm.weight") and layer in SHARES:
            parameter *= self._boosts[layer]
            parameter[0] = self._unit
        elif part in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            if layer == LAYER:
                parameter[:hidden] = torch.diag(self._sizes)
                parameter[hidden : 2 * hidden] = torch.diag(-self._sizes)
            elif layer in SHARES:
                parameter[places] = 0
                parameter[places, 0] = self._inner[layer][int("up" in part)].to(parameter.dtype)
        elif part == "mlp.down_proj.weight":
            if layer == LAYER:
                parameter[:, : 2 * hidden] = 0
                parameter[0, : 2 * hidden] = self._makes.repeat(2).to(parameter.dtype)
            elif layer in SHARES:
                parameter[:, places] = 0
                parameter[0, places] = self._cancels[layer].to(parameter.dtype)

    def _exact(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).double()
