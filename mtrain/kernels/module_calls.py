"""Calls of modules with less overhead, for inference."""

from functools import cache

from torch import nn

from mtrain.kernels.undocumented import undocumented_allowed


def reduce_call_overhead(model: nn.Module) -> None:
    """Reduce the overhead of module calls in inference, which takes a quarter of a short decoding step.

    Calls go directly to `forward`, so hooks do not run. Parameters and submodules become plain attributes,
    which Python finds before it calls `nn.Module.__getattr__`; do not replace them afterwards.
    """
    if not undocumented_allowed():
        return
    for module in model.modules():
        vars(module).update(dict(module.named_parameters(recurse=False)))
        vars(module).update(dict(module.named_children()))
        module.__class__ = _without_hooks(type(module))  # type: ignore[arg-type]


@cache
def _without_hooks(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__call__": kind.forward})
