"""Names of the files in a compiled part's folder. NxD and NxDI choose them."""

WEIGHTS_FOLDER = "weights"
EXECUTABLE_FILE = "model.pt"
CONFIG_FILE = "neuron_config.json"


def rank_file(rank: int) -> str:
    """Return the path of one core's weights, relative to the part's folder."""
    return f"{WEIGHTS_FOLDER}/tp{rank}_sharded_checkpoint.safetensors"


def decoder_files(tp: int) -> tuple[str, ...]:
    """List the files of a compiled decoder, relative to its folder.

    model.pt             every graph of every bucket: NxDI's TorchScript with the NEFFs inside
    neuron_config.json   NxDI's config, for a human reader; a load goes by the plan
    weights/tp{rank}_sharded_checkpoint.safetensors
                         each core's weights: see neuron.nxdi.decoder_weights
    """
    return (EXECUTABLE_FILE, CONFIG_FILE, *(rank_file(rank) for rank in range(tp)))
