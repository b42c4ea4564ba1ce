"""transformers' image processor of a checkpoint, the one that needs no torchvision."""

from pathlib import Path
from typing import Any

from qwen3_omni_neuron.errors import CheckpointError


def load_image_processor(folder: Path) -> tuple[Any, Any]:
    """The processor, and the smart_resize that it goes by.

    Raises CheckpointError where the folder has no usable preprocessor_config.json.
    """
    try:  # transformers 5 has it in a file of its own
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Processor,
        )
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    except ModuleNotFoundError:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
            Qwen2VLImageProcessor as Processor,
        )
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
    # Asked here: of a folder that isn't there transformers would ask the Hub.
    if not (folder / "preprocessor_config.json").is_file():
        raise CheckpointError(f"{folder} has no preprocessor_config.json.")
    try:
        processor = Processor.from_pretrained(folder)
    except Exception as error:  # each transformers line has its own for a broken file
        raise CheckpointError(
            f"{folder} has no usable preprocessor_config.json: {error}"
        ) from error
    sizes = {
        "patch_size": processor.patch_size,
        "merge_size": processor.merge_size,
        "temporal_patch_size": processor.temporal_patch_size,
        "min_pixels": processor.size["shortest_edge"],
        "max_pixels": processor.size["longest_edge"],
    }
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{folder}/preprocessor_config.json has {name} {value!r}; 1 or more is needed."
            )
    if not processor.do_resize:
        raise CheckpointError(
            f"{folder}/preprocessor_config.json has do_resize off: pictures would fit no patches."
        )
    return processor, smart_resize
