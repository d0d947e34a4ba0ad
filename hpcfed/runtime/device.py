"""From arrays on the host to tensors on a device."""

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, without waiting for what the device is doing; the array
    may be reused at once.
    """
    return torch.from_numpy(array).to(device, non_blocking=True)
