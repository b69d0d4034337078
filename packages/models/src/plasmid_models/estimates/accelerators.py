"""GPUs that `rl plan` knows, with figures from the vendors' data sheets."""

from __future__ import annotations

from plasmid.errors import ConfigError
from plasmid.types.estimates import Accelerator

GIB = float(2**30)
TERA = 1e12


def _gpu(
    name: str, memory_gib: float, tflops: float, fp32_tflops: float, tb_per_s: float, link_gb_per_s: float, source: str
) -> Accelerator:
    return Accelerator(
        name=name,
        memory=memory_gib * GIB,
        flops=tflops * TERA,
        fp32_flops=fp32_tflops * TERA,
        bandwidth=tb_per_s * TERA,
        link=link_gb_per_s * 1e9,
        source=source,
    )


ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 79.1, 989, 67, 3.35, 450, "NVIDIA H100 data sheet, SXM5 80 GB"),
        _gpu("h200", 139.8, 989, 67, 4.8, 450, "NVIDIA H200 data sheet, SXM 141 GB"),
        _gpu("h20", 95.0, 148, 44, 4.0, 450, "NVIDIA H20 product brief, 96 GB"),
        _gpu("b200", 178.0, 2250, 80, 8.0, 900, "NVIDIA Blackwell data sheet, HGX B200 180 GB"),
        _gpu("a100", 79.1, 312, 19.5, 2.04, 300, "NVIDIA A100 data sheet, SXM4 80 GB"),
        _gpu("a100-40gb", 39.4, 312, 19.5, 1.555, 300, "NVIDIA A100 data sheet, SXM4 40 GB"),
        _gpu("l40s", 44.4, 362, 91.6, 0.864, 32, "NVIDIA L40S data sheet, 48 GB"),
        _gpu("l4", 22.0, 121, 30.3, 0.3, 32, "NVIDIA L4 data sheet, 24 GB"),
        _gpu("rtx4090", 23.5, 165, 82.6, 1.008, 32, "NVIDIA Ada architecture paper, GeForce RTX 4090 24 GB"),
    )
}
"""GPUs by the name that ``--gpu`` accepts. Memory is the nominal size minus what the driver reserves."""
DEFAULT = "h100"


def find_accelerator(name: str) -> Accelerator:
    """Return the GPU of this name. Raises `ConfigError` if it is not in the table."""
    try:
        return ACCELERATORS[name.lower()]
    except KeyError:
        raise ConfigError(f"--gpu: unknown GPU {name!r}; known are {', '.join(ACCELERATORS)}") from None


def match_accelerator(product: str) -> Accelerator | None:
    """Return the GPU with the driver's product name, as ``NVIDIA H100 80GB HBM3``; None if it is not in the table."""
    words = product.lower().replace("rtx ", "rtx").replace("-", " ").split()
    if "a100" in words and "40gb" in words:
        return ACCELERATORS["a100-40gb"]
    return next((gpu for name, gpu in ACCELERATORS.items() if name in words), None)
