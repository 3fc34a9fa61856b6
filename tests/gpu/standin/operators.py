"""What kernels do, done on the CPU when their stream comes to it.

Memory of the stand-in's devices is the host's, so each operator for CUDA can be the CPU's on
tensors that share the memory. One that changes a tensor in place is queued, and so happens as
late as its stream gets there. One that makes a tensor waits for its stream first, as its
shape may depend on values. Copies between host and device stay torch's own.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    Operator = Callable[..., Any]

#: Operators that only make tensors or look at one: they are torch's own for CUDA.
_THEIRS = {
    "_local_scalar_dense",
    "empty",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "set_",
}
_COPY: OpOverload[..., Any] = torch.ops.aten.copy_.default
_runtime = ctypes.CDLL(None)
_bytes_at = _runtime.standin_bytes
_bytes_at.restype, _bytes_at.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
_numbers = itertools.count(1)
_queued: dict[int, Callable[[], object]] = {}
_captured: set[int] = set()
_generators: dict[tuple[torch.device, int], torch.Generator] = {}
_libraries: list[torch.library.Library] = []


def _do(number: int) -> None:
    """Do what was queued. On the stream's thread; a graph does it again and again."""
    work = _queued[number] if number in _captured else _queued.pop(number)
    try:
        with torch.inference_mode():  # in which any tensor can be written to
            work()
    except BaseException as error:  # nobody is there who could take it
        os.write(2, f"stand-in for CUDA: an operator failed: {error!r}\n".encode())
        os.abort()


_run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_do)  # kept: streams call it


def _queue(work: Callable[[], object], device: torch.device) -> None:
    number = next(_numbers)
    _queued[number] = work
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            _captured.add(number)
        stream = torch.cuda.current_stream(device).cuda_stream
        code = _runtime.standin_launch(ctypes.c_void_p(stream), _run, ctypes.c_void_p(number))
    if code:
        raise RuntimeError(f"CUDA error: {code}")


def _on_host(value: Any) -> Any:
    """Give what the CPU takes instead: the same memory, if it is a tensor."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        key = value.device, value.initial_seed()
        if key not in _generators:
            _generators[key] = torch.Generator().manual_seed(value.initial_seed())
        return _generators[key]
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    storage, layout = value.untyped_storage(), (value.size(), value.stride())
    if not storage.nbytes():
        return torch.empty_strided(*layout, dtype=value.dtype)
    raw = (ctypes.c_char * storage.nbytes()).from_address(_bytes_at(storage.data_ptr()))
    memory = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    host = torch.empty(0, dtype=value.dtype).set_(memory, value.storage_offset(), *layout)
    torch._C._set_conj(host, value.is_conj())
    torch._C._set_neg(host, value.is_neg())
    return host


def _to_device(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.resolve_conj().resolve_neg()
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    _on_host(made).copy_(value)
    return made


def _device_of(arguments: object) -> torch.device:
    found: list[torch.device] = []

    def see(value: object) -> None:
        device = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(device, torch.device) and device.type == "cuda":
            found.append(device)

    tree_map(see, arguments)
    index = found[0].index if found else None
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _operator_for(operator: OpOverload[..., Any]) -> Operator:
    """Make the operator for CUDA of that for the CPU."""
    schema = operator._schema
    written = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    changes_in_place = bool(written) and operator._opname.endswith("_")

    def work(*args: Any, **kwargs: Any) -> Any:
        device = _device_of((args, kwargs))
        host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
        changed = [kwargs[name] if name in kwargs else args[i] for i, name in written]
        if changes_in_place:
            _queue(lambda: operator(*host_args, **host_kwargs), device)
        else:
            torch.cuda.current_stream(device).synchronize()
            results = operator(*host_args, **host_kwargs)
            if not changed:
                return tree_map(lambda value: _to_device(value, device), results)
            results = results if isinstance(results, tuple) else (results,)
            for target, result in zip(changed, results, strict=False):
                if target.shape != result.shape:
                    target.resize_(result.shape)
                _on_host(target).copy_(result)
        if len(schema.returns) <= 1:
            return changed[0] if schema.returns else None
        return tuple(changed[: len(schema.returns)])

    return work


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002  # as torch has it
    if target.is_cuda and source.is_cuda:
        if target.device != source.device:
            torch.cuda.current_stream(source.device).synchronize()
        to, of = _on_host(target), _on_host(source)
        _queue(lambda: _COPY(to, of), target.device)
        return target
    device, host = (target, source) if target.is_cuda else (source, target)
    is_alike = (target.is_conj(), target.is_neg()) == (source.is_conj(), source.is_neg())
    is_kernel = target.is_cuda and not is_alike  # which is no operator, so it is done here
    is_plain = target.dtype == source.dtype and target.shape == source.shape
    is_plain &= target.is_contiguous() and source.is_contiguous()
    if is_kernel or not (non_blocking and is_plain and host.is_pinned()):
        # torch waits for the stream with the GIL, which what is queued there needs
        torch.cuda.current_stream(device.device).synchronize()
    if is_kernel:
        _on_host(target).copy_(source)
        return target
    theirs = torch._C.DispatchKey.CompositeExplicitAutograd
    _COPY._op_dk(theirs, target, source, non_blocking)
    return target


def install() -> None:
    """Put the operators in, for this process."""
    library = torch.library.Library("aten", "IMPL")  # as long as the process
    _libraries.append(library)
    atexit.register(_runtime.standin_drain)  # no stream needs an interpreter that is gone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are others already
        for full_name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = full_name.partition("::")
            packet, _, overload = name.partition(".")
            has_one = torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CUDA")
            if namespace != "aten" or not has_one or packet in _THEIRS:
                continue
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            is_view = any(
                result.alias_info is not None and not result.alias_info.is_write
                for result in operator._schema.returns
            )
            if not is_view:
                library.impl(name, _operator_for(operator), "CUDA")
        library.impl("copy_", _copy, "CUDA")
        torch.empty(0)  # the warnings come at the next call
