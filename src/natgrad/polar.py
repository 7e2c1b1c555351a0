"""Polar: whitened, orthogonalised gradients at the norm of each layer's weight."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from natgrad.factors.refresh import Every, Paced
from natgrad.layers.groups import groups_by_role
from natgrad.options import Options
from natgrad.rules.fallbacks import Adam
from natgrad.rules.lengths import LayerTrust
from natgrad.rules.motion import AverageGradients, Decoupled
from natgrad.rules.orthogonal import Orthogonal
from natgrad.spngd import SPNGD


class Polar(SPNGD):
    """An optimizer for whole networks: whitened, orthogonalised, layer by layer.

    For a layer with weight w (and bias), V the running average of its gradient with
    Nesterov's look-ahead, A the second moment of its inputs, and a the mean eigenvalue
    of A::

        P  = polar(V (A + damping a I)^-1)  all singular values become about 1
        U  = P / sqrt(S)                    S: the running mean square of each row of P
        w <- w - lr f |w0| U / |U|          w0 is the weight that training began with

    A learning rate of 0.03 moves w by 3% of what it was at the start. f is 1 as long as
    gradients have their usual size, and falls with gradients that vanish (`LayerTrust`
    and `natgrad.math.rules.fading`), so that a constant rate trains to the end.
    Biases without a weight, normalisation layers and parameters of unknown layers
    follow Adam's rule with a fifth of the learning rate. No gradient statistic is
    estimated. ::

        optimizer = natgrad.Polar(model)  # lr=0.03

    Given no groups, it makes up to three (`print(optimizer)` shows them). Layers that a
    batch, group or instance norm follows (convolutions, mostly) are brought back to the
    norm that they began with after each step (`FixedNorm`): it has no other effect than
    to shorten later steps. Their rule is whitened by halves, which ends higher on
    convolutional networks at small batch: ``U = polar(V W) W^T`` with ``W W^T = (A + a
    I)^-1`` (``Polar.normalised``). A vocabulary, embeddings and a last layer with as
    many outputs as an embedding has rows, follows ``Polar.vocabulary``: Adam's rule
    with a tenth of the learning rate. One group for all parameters
    (``[{"params": model.named_parameters()}]``) has the rule above and no fixed norms;
    a ``rule`` or ``damping`` that is given is that of the normalised layers too.

    It is `SPNGD` with other options, ``Polar.defaults``, and takes the same arguments.
    """

    finds_rates: ClassVar[bool] = False
    defaults: ClassVar[Options] = Options(
        rule=Orthogonal(sides="inputs", whitening="full", beta2=0.95),
        fallback=Adam(rate=0.2, beta2=0.999),
        length=LayerTrust(),
        average=AverageGradients(nesterov=True),
        decay=Decoupled(),
        lr=0.03,
        weight_decay=0.01,
        momentum=0.8,
        damping=0.2,
        refresh=Paced(Every(statistics=5, inverses=5)),
        factor_decay=0.8,
        subsample=None,
        strategy="spngd",
    )
    """The options that hold unless others are given."""

    vocabulary: ClassVar[Adam] = Adam(rate=0.1)
    """The rule of embeddings and of the head that they share their size with."""
    normalised: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"rule": Orthogonal(sides="inputs"), "damping": 1.0}
    )
    """The rule and damping of layers that a normalisation follows."""

    def _usual_groups(self, model: nn.Module, options: Options) -> list[dict[str, Any]]:
        # a rule that was asked for is that of all matrices
        usual = (options.rule, options.damping)
        asked = usual != (Polar.defaults.rule, Polar.defaults.damping)
        return groups_by_role(model, self.vocabulary, {} if asked else self.normalised)
