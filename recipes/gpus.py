"""What the GPUs that `k3 estimate gpu=NAME` knows can do, from their makers' data sheets (dense figures, without sparsity).

Sources: NVIDIA A100 80GB SXM, H100 SXM, H200 SXM, DGX A100, DGX H100, DGX B200 and GB200 NVL72 data sheets; AMD Instinct MI300X.
Bandwidths are those of one direction of one GPU; networks those of the makers' reference systems, a port a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

TERA, GIGA = 10**12, 10**9


class Gpu(Enum):
    a100 = "a100"
    h100 = "h100"
    h200 = "h200"
    b200 = "b200"
    gb200 = "gb200"
    mi300x = "mi300x"


@dataclass(frozen=True)
class GpuSpec:
    memory: float  # bytes
    bf16: float  # operations a second, dense
    fp8: float | None  # likewise; None: has none
    fp32: float  # likewise, without tensor cores: what float32 products run at unless TF32 is allowed
    hbm: float  # bytes a second
    link: float  # bytes a second to a GPU of the same domain (NVLink, Infinity Fabric)
    network: float  # bytes a second to any other
    domain: int  # GPUs that `link` joins


SPECS = {
    Gpu.a100: GpuSpec(80 * GIGA, 312 * TERA, None, 19.5 * TERA, 2.039 * TERA, 300 * GIGA, 25 * GIGA, 8),
    Gpu.h100: GpuSpec(80 * GIGA, 989 * TERA, 1979 * TERA, 67 * TERA, 3.35 * TERA, 450 * GIGA, 50 * GIGA, 8),
    Gpu.h200: GpuSpec(141 * GIGA, 989 * TERA, 1979 * TERA, 67 * TERA, 4.8 * TERA, 450 * GIGA, 50 * GIGA, 8),
    # DGX B200: 1,440 GB, 72 PFLOP/s fp8 with sparsity, 64 TB/s and 14.4 TB/s NVLink for eight
    Gpu.b200: GpuSpec(180 * GIGA, 2250 * TERA, 4500 * TERA, 75 * TERA, 8 * TERA, 900 * GIGA, 50 * GIGA, 8),
    # NVL72: 13.4 TB, 360 PFLOP/s bf16 with sparsity, 576 TB/s and 130 TB/s NVLink for 72
    Gpu.gb200: GpuSpec(186 * GIGA, 2500 * TERA, 5000 * TERA, 80 * TERA, 8 * TERA, 900 * GIGA, 50 * GIGA, 72),
    # seven links of 64 GB/s to the others of a platform of eight
    Gpu.mi300x: GpuSpec(192 * GIGA, 1307 * TERA, 2615 * TERA, 163.4 * TERA, 5.3 * TERA, 448 * GIGA, 50 * GIGA, 8),
}


@dataclass
class EstimateConfig:
    """How far from a data sheet a GPU is in practice: assumptions, not measurements of this code."""

    matmul: float = 0.6  # of the peak, that dense products reach
    experts: float = 0.45  # likewise of grouped products,
    attention: float = 0.45  # of fused attention,
    kda: float = 0.2  # and of KDA's chunk products: small ones, partly in float32
    bandwidth: float = 0.75  # of memory, links and network
    touches: float = 2.0  # times that a saved byte passes through memory in a forward pass, all elementwise work; twice backward
    imbalance: float = 1.1  # max/mean load of the ranks' experts
    hidden: float = 0.0  # share of the exchange with experts that computation hides
    latency: float = 2e-5  # seconds, of every collective
    memory: float = 0.9  # of the GPU's, that a layout may fill: the rest is for kernels, the allocator and libraries
