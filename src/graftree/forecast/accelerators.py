"""Public figures of accelerators: memory, peaks, bandwidths.

All are per device of JAX, and what the vendor says: peaks without sparsity, bandwidths
in one direction. A step can't be faster than these allow.

Sources: Google Cloud, "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x" (2026), under
docs.cloud.google.com/tpu/docs, with the memory that libtpu 0.0.50 says is available
where a program needs more; NVIDIA, data sheets of A100, H100, H200 and of HGX B200;
"CUDA C++ Programming Guide", table of compute capabilities. Links between hosts are
those of a DGX system with one network card per GPU.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

GB, TB, TFLOPS = 1e9, 1e12, 1e12


class GPU(NamedTuple):
    """What XLA's compiler asks of a GPU.

    Attributes:
        name: As the driver gives it.
        capability: The compute capability, major and minor.
        cores: Number of streaming multiprocessors.
        shared_memory: KiB of a core, of which a block can have all but one.
        l2_cache: MiB.
        clock: Boost clock, GHz.
        fp32_units: Per core.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    shared_memory: int
    l2_cache: int
    clock: float
    fp32_units: int = 128


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device.

    Attributes:
        memory: Bytes that a program can have: of a GPU all that the driver gives, of
            which the runtime takes some; of a TPU what its compiler allows.
        flops: Operations per second of its matrix units, in bf16.
        flops_8_bit: In fp8 or int8; those of bf16 if it has neither.
        memory_bandwidth: Bytes per second.
        link: Bytes per second that it sends to others near it, over all its links.
        host_link: Bytes per second that it sends to devices of other hosts.
        gpu: Its description for the compiler; ``None`` for a TPU.
        topology_name: A TPU's name in the compiler.
    """

    memory: float
    flops: float
    flops_8_bit: float
    memory_bandwidth: float
    link: float
    host_link: float
    gpu: GPU | None = None
    topology_name: str = ""

    def peak(self, bits: int) -> float:
        """Operations per second of products whose operands have so many bits.

        Wider ones than bf16 count as that: on TPUs XLA splits or rounds them, and GPUs
        have TF32, so none of them is faster.
        """
        return self.flops if bits > 8 else self.flops_8_bit


def _tpu(
    name: str, memory: float, flops: tuple[float, float], bandwidth: float, link: float
) -> Accelerator:
    # The links of TPUs join all hosts of a slice.
    bf16, int8 = flops
    return Accelerator(
        memory * 2**30,
        bf16 * TFLOPS,
        int8 * TFLOPS,
        bandwidth * GB,
        link * GB,
        link * GB,
        topology_name=name,
    )


def _gpu(
    description: GPU,
    memory: float,
    flops: tuple[float, float],
    bandwidth: float,
    links: tuple[float, float],
) -> Accelerator:
    (bf16, fp8), (link, host_link) = flops, links
    return Accelerator(
        memory,
        bf16 * TFLOPS,
        fp8 * TFLOPS,
        bandwidth * TB,
        link * GB,
        host_link * GB,
        gpu=description,
    )


_A100, _H100, _B200 = (8, 0), (9, 0), (10, 0)

ACCELERATORS = {
    # GiB; Tflop/s in bf16, in 8 bits; GB/s of memory, of all links. A chip of v4 and
    # v5p is one device, one of 7x is two.
    "v4": _tpu("v4", 30.75, (275, 275), 1200, 300),
    "v5e": _tpu("v5e", 15.75, (197, 393), 819, 200),
    "v5p": _tpu("v5p", 95.73, (459, 918), 2765, 600),
    "v6e": _tpu("v6e", 31.24, (918, 1836), 1638, 400),
    "7x": _tpu("tpu7x", 94.74, (1153.5, 2307), 3690, 300),
    # Bytes as the driver gives them; Tflop/s; TB/s of memory; GB/s of NVLink, network.
    "a100": _gpu(
        GPU("NVIDIA A100-SXM4-40GB", _A100, 108, 164, 40, 1.41, 64),
        42_297_786_368, (312, 624), 1.555, (300, 25),
    ),
    "a100-80gb": _gpu(
        GPU("NVIDIA A100-SXM4-80GB", _A100, 108, 164, 40, 1.41, 64),
        85_098_758_144, (312, 624), 2.039, (300, 25),
    ),
    "h100": _gpu(
        GPU("NVIDIA H100 80GB HBM3", _H100, 132, 228, 50, 1.98),
        84_942_979_072, (989.4, 1978.9), 3.352, (450, 50),
    ),
    "h200": _gpu(
        GPU("NVIDIA H200", _H100, 132, 228, 50, 1.98),
        150_754_820_096, (989.4, 1978.9), 4.8, (450, 50),
    ),
    "b200": _gpu(
        GPU("NVIDIA B200", _B200, 148, 228, 126, 1.965),
        192_265_846_784, (2250, 4500), 7.7, (900, 50),
    ),
}  # fmt: skip
