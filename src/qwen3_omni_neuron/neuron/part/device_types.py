"""The types of numbers on the device: there an int64 is an int32. The only place that converts."""

import torch
from torch import Tensor

_ON_DEVICE = {torch.int64: torch.int32}


def device_type(dtype: torch.dtype) -> torch.dtype:
    """What a number of this type is on the device."""
    return _ON_DEVICE.get(dtype, dtype)


def to_device_type(x: Tensor) -> Tensor:
    """x in the type that it has on the device."""
    return x.to(device_type(x.dtype))
