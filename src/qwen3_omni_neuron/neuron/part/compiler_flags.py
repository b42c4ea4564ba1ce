"""What neuronx-cc is told, graph by graph."""

from qwen3_omni_neuron.graphs.graph import Graph

# The parts whose graphs run every frame.
_EVERY_FRAME = ("code_predictor", "code2wav")


def compiler_flags(graph: Graph, lnc: int, profile: str) -> str:
    """The flags of one graph of a part that is traced from model/.

    lnc: physical cores a logical one, which is the runtime's NEURON_LOGICAL_NC_CONFIG. profile:
    "safe" is -O2 for what runs every frame, and -O1, which compiles sooner, for what runs once a
    request; "fast" is -O2 for all.
    """
    level = 2 if profile == "fast" or graph.part in _EVERY_FRAME else 1
    return f"--auto-cast=none --model-type=transformer -O{level} --lnc={lnc}"
