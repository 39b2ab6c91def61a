"""The modules of a model: whether each computes what its class and its tensors say, which is all
that keys hold. Dropout in training mode is beyond that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from impress.errors import Unsupported


def modules_of(model: Any) -> list[Any]:
    """Every module once. torch's own walk takes three times as long: it makes their names."""
    found: dict[int, Any] = {}
    left = [model]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            left.extend(module._modules.values())
    return list(found.values())


def check_eval(model: Any, modules: Sequence[Any]) -> None:
    """Raises Unsupported where one is in training mode: adapters put in after eval() are."""
    for module in modules:
        if module.training:
            raise Unsupported(
                f"{_name(model, module)} is in training mode (dropout): call model.eval()"
            )


def _name(model: Any, module: Any) -> str:
    names = (name for name, other in model.named_modules() if other is module)
    return next(names, "") or "the model"
