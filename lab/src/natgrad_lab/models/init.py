"""Weight initialisation shared by the models."""

from torch import nn

_NORMS = (nn.BatchNorm2d, nn.LayerNorm)


def he_normal_(model: nn.Module) -> None:
    """Initialise every convolution and linear layer as SP-NGD does, in place.

    Weights are normal with variance 2 / fan_in (Chainer's HeNormal with its default
    arguments; SP-NGD, Osawa et al. 2020, section 7), biases zero, norms identity.
    On the meta device this does nothing.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            _zero_bias_(module)
        elif isinstance(module, _NORMS):
            module.reset_parameters()


def spread_norms_(model: nn.Module, deviation: float) -> None:
    """Draw the weights of normalisation layers from N(1, deviation^2), in place."""
    for module in model.modules():
        if isinstance(module, _NORMS) and module.weight is not None:
            nn.init.normal_(module.weight, mean=1.0, std=deviation)


def transformer_(model: nn.Module, *, depth: int, residual: str = "out") -> None:
    """Initialise a transformer as GPT-2 does, in place.

    Weights are normal with deviation 0.02; linear layers named `residual`, which write
    into the residual stream, are divided by sqrt(2 * depth).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            writes = name.rsplit(".", 1)[-1] == residual
            scale = (2 * depth) ** -0.5 if writes else 1.0
            nn.init.normal_(module.weight, std=0.02 * scale)
            _zero_bias_(module)


def _zero_bias_(module: nn.Module) -> None:
    bias = getattr(module, "bias", None)
    if bias is not None:
        nn.init.zeros_(bias)
