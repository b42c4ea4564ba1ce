"""Files of a graph that NxD compiled, in its folder."""

from qwen3_omni_neuron.neuron.part import rank_file

EXECUTABLE_FILE = "model.pt"
CONFIG_FILE = "neuron_config.json"


def decoder_files(tp: int) -> tuple[str, ...]:
    """List the files of a compiled decoder, relative to its folder.

    model.pt             every graph of every bucket: NxDI's TorchScript with the NEFFs inside
    neuron_config.json   NxDI's config, for a human reader; loading reads the plan instead
    weights/tp{rank}_sharded_checkpoint.safetensors
                         each core's weights: see neuron.nxdi.decoder_weights
    """
    return (EXECUTABLE_FILE, CONFIG_FILE, *(rank_file(rank) for rank in range(tp)))
