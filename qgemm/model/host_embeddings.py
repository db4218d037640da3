"""``offload_embeddings``: keeps embedding tables in host memory, from which the GPU reads the rows that it needs.

A decoding step reads one row of a table per token, some kilobytes, and leaves gigabytes unused; the bus transfers that
in microseconds. The table stays a CUDA tensor, whose memory is page-locked host memory: ``nn.Embedding``, CUDA graphs,
``torch.compile`` and files use it as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qgemm.model.selection import listed
from qgemm.warn import warn_user

MIN_BYTES = 2**24
"""Smaller tables stay on the GPU, because moving them gains nothing."""
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU
_locked: set[int] = set()
"""The addresses of the tables in host memory."""


def offload_embeddings(model: nn.Module) -> int:
    """Moves the tables of ``nn.Embedding`` modules of 16 MB and more from the GPU to host memory, in place.

    The memory is page-locked and the GPU reads rows from it: outputs have the same bits, and saved checkpoints the same
    tensors. Returns how many bytes of GPU memory were freed, 1.05 GB for Llama 3 8B in bfloat16. A table that other
    layers read too, such as that of a tied output head, stays on the GPU, with a warning.
    ``embedding.weight.data = embedding.weight.data.clone()`` moves a table back, ``model.cpu()`` moves the whole model.

    Raises ``ValueError`` for a model without embeddings on a GPU, ``RuntimeError`` if the system can't lock enough
    memory; the table then stays where it was.
    """
    embeddings = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.weight.is_cuda and type(module.weight.data) is Tensor
    }
    if not embeddings:
        raise ValueError("the model has no embeddings on a GPU: move it there first, with model.to('cuda')")
    read_by_others = set(_addresses(module for module in model.modules() if not isinstance(module, nn.Embedding)))
    moved, tied = 0, []
    for name, module in embeddings.items():
        weight = module.weight
        address = weight.untyped_storage().data_ptr()
        if weight.nbytes < MIN_BYTES or address in _locked:
            continue
        if address in read_by_others:
            tied.append(name)
        else:
            weight.data = _on_host(weight.data)
            moved += weight.nbytes
    if tied:
        warn_user(
            f"{listed(tied)} stayed on the GPU: other layers read the same weight. Give a tied output head one of its "
            "own before: model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone()), and "
            "model.config.tie_word_embeddings = False"
        )
    return moved


def _addresses(modules: Iterator[nn.Module]) -> Iterator[int]:
    """The addresses of all their parameters on a GPU."""
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if parameter.is_cuda and type(parameter.data) is Tensor:
                yield parameter.untyped_storage().data_ptr()


class _HostMemory:
    """Page-locked memory with the bytes of a tensor, described in the way that libraries share GPU memory."""

    def __init__(self, values: Tensor) -> None:
        held = torch.empty_like(values, device="cpu").copy_(values)
        address, size = held.data_ptr(), held.nbytes
        with torch.cuda.device(values.device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        if error:
            raise RuntimeError(
                f"the system couldn't lock {size / 1e9:.2f} GB of memory for the GPU (cudaHostRegister returned {error}"
                "): raise the limit of locked memory (ulimit -l), or leave the embeddings on the GPU"
            )
        _locked.add(address)
        weakref.finalize(self, _release, held, values.device).atexit = False
        self.__cuda_array_interface__ = {
            "version": 2, "typestr": "|u1", "shape": (size,), "strides": None, "data": (address, False),
        }  # fmt: skip


def _on_host(values: Tensor) -> Tensor:
    """A CUDA tensor with the same values in host memory. PyTorch keeps that memory as long as the tensor."""
    table = torch.as_tensor(_HostMemory(values.contiguous()), device=values.device)
    return table.view(values.dtype).view(values.shape)


def _release(held: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels may still read it
    torch.cuda.cudart().cudaHostUnregister(held.data_ptr())
    _locked.discard(held.data_ptr())
