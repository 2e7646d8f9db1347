"""What makes costs on PyTorch differ from one machine to another, and how its devices are waited for.

Measuring and remembering are `core/calibration.py`'s.
"""

from __future__ import annotations

import torch

from dflash.backends.torch.clock import waiting_for
from dflash.core.calibration import Device
from dflash.core.engine_info import EngineInfo


def device_of(info: EngineInfo) -> Device:
    """The device that an engine runs on."""
    name = torch.cuda.get_device_name(info.device) if info.device.startswith("cuda") else info.device
    wait = waiting_for(torch.device(info.device))
    return Device({"torch": torch.__version__, "device": name}, *([] if wait is None else [wait]))
