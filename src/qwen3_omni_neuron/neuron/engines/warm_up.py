"""Every graph called once after it was loaded, so that no request meets a graph's first call."""

import logging
import time

from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.nxdi.inputs import decoder_examples
from qwen3_omni_neuron.neuron.nxdi.slots import DecoderGraphs
from qwen3_omni_neuron.neuron.part.part import LoadedPart

logger = logging.getLogger(__name__)


def warm_up(name: str, part: LoadedPart) -> None:
    """Call every graph of a part, with inputs that leave every slot of its state as it is.

    name: of the part, for the log. Raises what a graph raises.
    """
    started = time.monotonic()
    for label, graph in part.graphs.items():
        part.call(label, *[spec.idle_input() for spec in graph.inputs])
    _log(name, len(part.graphs), started)


def warm_up_decoder(name: str, graphs: DecoderGraphs, config: OmniConfig) -> None:
    """As `warm_up`, for the graphs of a decoder. What they leave in slot 0 a prefill overwrites.

    name: "thinker" or "talker".
    """
    started, count = time.monotonic(), 0
    for kind, _, inputs in decoder_examples(config, name, graphs.plan):
        call = graphs.prefill if kind == "prefill" else graphs.decode
        call(inputs)
        count += 1
    _log(name, count, started)


def _log(name: str, graphs: int, started: float) -> None:
    seconds = time.monotonic() - started
    logger.info("%s: called each of %d graphs once, in %.1f s", name, graphs, seconds)
