"""Why a parameter has no block, in words for the report."""

from torch import Tensor, nn
from torch.nn.utils import parametrize

from natgrad.layers.kind import LayerOptions
from natgrad.layers.table import kind_of, type_name, why_unknown

MHA = "MultiheadAttention does not call it as a layer"


def why_plain(model: nn.Module, parameter_name: str) -> str:
    """Why a parameter of the model is not the weight or bias of a block."""
    path, _, own = parameter_name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(owner, parametrize.ParametrizationList):
        layer, _, tensor = path.rpartition("parametrizations.")
        owner = model.get_submodule(layer.removesuffix("."))
        return f"{_computed(owner, tensor)} from it"
    kind = kind_of(owner, LayerOptions())
    if kind is None:
        return why_unknown(owner)
    name, weight = type_name(type(owner)), kind.weight_name
    if weight in dict(owner.named_parameters(recurse=False)):
        return f"the {weight} of its {name} is frozen"
    if not isinstance(getattr(owner, weight, None), Tensor):
        return f"its {name} has no parameter {weight!r}: register_layer can name it"
    source = " from it" if own.startswith(f"{weight}_") else ""
    return f"{_computed(owner, weight)}{source}"


def _names(hook: object) -> tuple[str, str]:
    """What torch's weight_norm and spectral_norm, and its pruning, call the tensor."""
    return getattr(hook, "name", ""), getattr(hook, "_tensor_name", "")


def _computed(owner: nn.Module, tensor: str) -> str:
    """What torch's parametrisations, new or old, do to a tensor of a layer."""
    if parametrize.is_parametrized(owner):
        # torch derives a class "ParametrizedLinear" of Linear
        name = type_name(type(owner).__mro__[1])
        makers = owner.get_submodule(f"parametrizations.{tensor}").children()
    else:
        name = type_name(type(owner))
        hooks = owner._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
        makers = (h for h in hooks if tensor in _names(h))
    how = ", ".join(type(maker).__name__.strip("_") for maker in makers)
    return f"the {tensor} of its {name} is computed ({how or 'by hand'})"
