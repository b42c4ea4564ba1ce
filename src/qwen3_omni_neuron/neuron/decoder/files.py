"""What a compiled decoder's folder holds."""

from qwen3_omni_neuron.neuron.rank_files import rank_file

EXECUTABLE_FILE = "model.pt"
CONFIG_FILE = "neuron_config.json"


def decoder_files(tp: int) -> tuple[str, ...]:
    """By path under the folder, for the manifest:

    model.pt             every graph of every bucket, as NxDI's TorchScript with their NEFFs inside
    neuron_config.json   what NxDI was told, for a reader: the plan is what a load goes by
    weights/tp{rank}_sharded_checkpoint.safetensors    each core's weights (see decoder_shards)
    """
    return (EXECUTABLE_FILE, CONFIG_FILE, *(rank_file(rank) for rank in range(tp)))
