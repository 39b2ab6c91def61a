"""Whether a model is still the one that its namespace was derived from: its weights, above all."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from impress.engines.hf_modules import (
    Found,
    check_adapters,
    check_causal,
    foreign_code,
    modules_of,
    of_package,
    served_modules,
)
from impress.errors import StoreMismatch
from impress.foreign import adapter_settings, foreign_settings

#: Elements of a tensor to notice a change by. Odd, so that a matrix's lie in many columns.
SAMPLES: Final = 31

#: Elements that numpy reads without letting go of the interpreter (above them it does).
_HELD: Final = 500

_PLAIN: Final = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}  # their memory is their values
_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Weights:
    """A model's weights as they are, to check later whether they still are. Process-local.

    Noticed: a parameter or buffer that is another object, lies elsewhere, has another shape or
    order, or was written so that autograd's version moved; a module of another class, or a new one;
    another adapter; what a module of another package keeps in plain attributes, or finds in its
    class or the model's config; another number of layers to run; and, whatever way it was written
    (`.data`, inference mode, memory used again), a change of the sampled elements. Not noticed: a
    change that moves neither address nor version and hits no sampled element, such as a few rows of
    an embedding through `.data`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        found = modules_of(model)
        tensors = found.tensors
        # Weak: what was replaced is to be freed; what is gone never passes for what took its place.
        self._refs = [weakref.ref(tensor) for tensor in tensors]
        # Asked once: is_inference() lets go of the interpreter, got back late while a request is
        # being stored (measured, 290 tensors: up to 60 waits, 1.8 ms instead of .4).
        self._tracked = [not tensor.is_inference() for tensor in tensors]
        self._places = _places(tensors, self._tracked)
        self._host = _HostSamples([tensor for tensor in tensors if _is_plain(tensor)])
        self._others = [i for i, tensor in enumerate(tensors) if not _is_plain(tensor)]
        self._samples = self._sampled(tensors)
        self._adapter = _adapter(model, found)
        self._foreign = foreign_settings(model)
        self._classes = found.classes
        self._n_layers = _n_layers(model)

    def check(self, found: Found | None = None) -> None:
        """Called in every request. Raises StoreMismatch where weights have changed or code has come
        to a module, and Unsupported where a module is in training mode or sees what follows, or
        such an adapter was added. `found`: the model's modules, where the request's own check
        (`hf_models.check_request`) has just looked at them.
        """
        check_causal(self._model.config)
        check_adapters(self._model)
        found = found or served_modules(self._model)
        if said := foreign_code(self._model, found):
            raise StoreMismatch(f"the model changed since attach(): {said}")
        if self._changed(found):
            raise StoreMismatch("the model's weights changed since attach(): attach it again")
        if self._foreign and (now := foreign_settings(self._model)) != self._foreign:
            name, kind, attribute, _ = next(
                (one for one in now if one not in self._foreign), self._foreign[0]
            )
            raise StoreMismatch(
                f"{attribute or 'what'} that {name} ({kind}) keeps beside its tensors changed "
                "since attach(): attach the model again; keep what a forward writes elsewhere"
            )

    def _changed(self, found: Found) -> bool:
        """On a GPU this takes one copy from it."""
        # Over the same tensors. Modules without any count, too: an activation, or a wrapper that
        # changes a layer's rows.
        if found.classes != self._classes:
            return True
        if _n_layers(self._model) != self._n_layers:  # it decides what a forward runs
            return True
        tensors = found.tensors
        if len(tensors) != len(self._refs):
            return True
        if any(ref() is not tensor for ref, tensor in zip(self._refs, tensors, strict=True)):
            return True
        if _places(tensors, self._tracked) != self._places:
            return True
        # Not before: memory can be looked at only where each tensor still has what it had.
        if self._sampled(tensors) != self._samples:
            return True
        return _adapter(self._model, found) != self._adapter

    def _sampled(self, tensors: Sequence[torch.Tensor]) -> list[bytes]:
        """Samples of all tensors: on the host where they lie, others in one copy per device."""
        others = [tensors[i] for i in self._others]
        return self._host.read() + (_copied(others) if others else [])


class _HostSamples:
    """Samples of tensors in host memory, which is not kept: words are read where they lie.

    One array per word size spans all of that memory, and an index into it names the words. No torch
    call is made: each lets go of the interpreter, which while a request is being stored is got back
    late (measured, 68 tensors: 2 to 3 ms instead of .3). Nor is an array made per tensor: after a
    forward each is out of the processor's caches (.7 ms instead of .12).
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        lying: dict[tuple[int, int], list[npt.NDArray[np.int64]]] = {}
        for tensor in tensors:
            first, size = tensor.data_ptr(), tensor.element_size()
            n, step = _spread(tensor.numel())
            at = first + step * size * np.arange(n)
            lying.setdefault((size, first % size), []).append(at)
        groups = [(size, np.concatenate(some)) for (size, _), some in lying.items()]
        spans = [_span(size, at) for size, at in groups if len(at)]
        self._groups = [
            (span, index[at : at + _HELD])
            for span, index in spans
            for at in range(0, len(index), _HELD)
        ]

    def read(self) -> list[bytes]:
        return [span[index].tobytes() for span, index in self._groups]


class _Memory:
    """So many words of memory from an address on, for numpy to read. Most of them may be nobody's:
    only those that something else vouches for may be looked at."""

    def __init__(self, first: int, size: int, n: int) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": np.dtype(_WORDS[size]).str, "shape": (n,), "strides": (size,),
            "data": (first, True),
        }  # fmt: skip


def _span(
    size: int, at: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:  # fmt: skip
    """An array over memory from the first of these addresses of words to the last, and the index
    of each in it."""
    first = int(at.min())
    index = (at - first) // size
    return np.asarray(_Memory(first, size, int(index.max()) + 1)), index


def _n_layers(model: Any) -> int | None:
    """How many of its layers a Transformers model runs."""
    return getattr(model.config, "num_hidden_layers", None)


def _adapter(model: Any, found: Found) -> list[list[str]]:
    """The settings of PEFT's layers, if there are any: their names take a walk of torch's own."""
    return [] if of_package(found, "peft") is None else adapter_settings(model)


def _spread(n: int) -> tuple[int, int]:
    """How many of n elements in a row are looked at, at most SAMPLES, and the step between them."""
    step = max(1, -(-n // SAMPLES))
    return -(-n // step), step


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.data_ptr() != 0
    return plain and tensor.is_contiguous() and tensor.element_size() in _WORDS


def _places(
    tensors: Sequence[torch.Tensor], tracked: Sequence[bool]
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Where and how each lies: through `.data` a tensor changes shape without a new version.

    `tracked`: whether each has a version: those of inference mode have none, and raise.
    """
    return [
        (t.data_ptr(), t._version if has else 0, t.shape, t.stride(), t.dtype)
        for t, has in zip(tensors, tracked, strict=True)
    ]


@torch.inference_mode()
def _copied(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Some elements of every tensor, of all tensors on one device in one copy."""
    alike: dict[Any, dict[Any, list[torch.Tensor]]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(_sample(tensor))
    samples = []
    for by_dtype in alike.values():
        parts = [torch.cat(group).view(torch.uint8) for group in by_dtype.values()]
        samples.append(torch.cat(parts).cpu().numpy().tobytes())
    return samples


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most SAMPLES elements of a tensor, spread over it: a view [n] where it is contiguous."""
    if tensor.is_contiguous():
        n, step = _spread(tensor.numel())
        return tensor.as_strided((n,), (step,))
    return tensor[tuple(slice(None, None, -(-n // 5) or 1) for n in tensor.shape)].reshape(-1)
