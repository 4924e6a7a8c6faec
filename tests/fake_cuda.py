"""CUDA for fake tensors, which have shapes and a device but no data, on a PyTorch built without it.

`load_guard` comes before torch is imported, so a test runs this in a process of its own: autograd
asks every device for a guard and the library for its accelerator, and a build without CUDA has
neither. What is compiled here says cuda and does nothing.
"""

import ctypes
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <optional>
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());
namespace at::accelerator {
__attribute__((visibility("default"))) bool isAccelerator(c10::DeviceType) { return false; }
}
"""


def load_guard():
    """Have autograd accept tensors on cuda. Before torch is imported; needs g++."""
    home = Path(find_spec("torch").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{home / 'include'}"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
        for path in (home / "lib" / "libc10.so", library):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def pretend(n_byte=80 << 30):
    """Let torch believe in one GPU of `n_byte`, as far as fake tensors need it."""
    import torch

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
        """The kernel that a GPU takes: flash attention without a mask in 16 bits, else the
        memory-efficient one.
        """
        if attn_mask is None and q.dtype != torch.float32:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(q, k, v, dropout_p, is_causal)[0]
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        if attn_mask is not None:
            attn_mask = q.new_zeros(()).expand(*q.shape[:3], k.shape[2])
        return efficient(q, k, v, attn_mask, True, dropout_p, is_causal)[0]

    told = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "fake GPU",
        "is_bf16_supported": lambda *_: True,
        "mem_get_info": lambda *_: (n_byte, n_byte),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
    }
    for name, function in told.items():
        setattr(torch.cuda, name, function)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.nn.functional.scaled_dot_product_attention = attention
