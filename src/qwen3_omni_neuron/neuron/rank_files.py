"""Where a core's weights lie in a compiled part's folder: under the names that NxD gives them."""

WEIGHTS_FOLDER = "weights"


def rank_file(rank: int) -> str:
    """By path under the part's folder."""
    return f"{WEIGHTS_FOLDER}/tp{rank}_sharded_checkpoint.safetensors"
