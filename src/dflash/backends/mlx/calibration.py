"""What makes costs on MLX differ from one machine to another, and how its device is waited for.

Measuring and remembering are `core/calibration.py`'s.
"""

from __future__ import annotations

from importlib.metadata import version

import mlx.core as mx

from dflash.core.calibration import Device
from dflash.core.engine_info import EngineInfo


def device_of(info: EngineInfo, kv_bits: int | None) -> Device:
    """The device that an engine runs on; `kv_bits` changes what its attention costs."""
    hardware = mx.device_info().get("device_name", info.device)
    return Device({"mlx": version("mlx"), "device": [info.device, hardware], "kv_bits": kv_bits}, mx.synchronize)
