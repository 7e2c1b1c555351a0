"""Parameter groups of a model: the usual ones, and those that a user names."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from natgrad.layers.matrices import Matrix
from natgrad.layers.options import LayerOptions
from natgrad.layers.table import kind_of
from natgrad.layers.unwrap import unwrap
from natgrad.plan.describe import aligned
from natgrad.rules.fallbacks import Adam
from natgrad.rules.lengths import Free
from natgrad.rules.motion import AverageGradients, FixedNorm
from natgrad.rules.rule import Rule

HIDDEN, CONVOLUTIONS, EMBEDDINGS = "hidden", "convolutions", "embeddings"
HEAD, REST = "head", "rest"
NORMALISED, VOCABULARY = "normalised", "vocabulary"
NAMES = (HIDDEN, CONVOLUTIONS, EMBEDDINGS, HEAD, REST)
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

Named = str | nn.Module | Collection[str | nn.Module]
"""Names of parameters or modules, or modules themselves: one, or several."""


class GroupList(list[dict[str, Any]]):
    """Parameter groups; printed, a table of what is in them."""

    kinds: ClassVar[tuple[str, ...]] = NAMES
    """The names that `groups` gives, in their order."""

    def __str__(self) -> str:
        head = ("group", "tensors", "elements", "rule", "first and last")
        return "\n".join(aligned([head, *(_row(group) for group in self)]))


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    names = [name for name, _ in group["params"]]
    ends = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
    elements = sum(p.numel() for _, p in group["params"])
    rule = repr(group["rule"]) if "rule" in group else "the optimizer's"
    return str(group.get("name", "")), f"{len(names)}", f"{elements:,}", rule, ends


def groups(
    model: nn.Module,
    rule: Rule | None = None,
    *,
    rest: Rule | None = None,
    matrices: Mapping[str, int] | None = None,
) -> GroupList:
    """The usual parameter groups of a model, for any natgrad optimizer. ::

        groups = natgrad.groups(model)
        print(groups)  # a table
        groups[-1]["lr"] = 3e-4
        optimizer = natgrad.Polar(model, groups, lr=0.02)

    ``"hidden"`` matrices and ``"convolutions"`` follow the optimizer's rule;
    ``"embeddings"``, the ``"head"`` (the last linear layer, if it is not the only
    matrix) and the ``"rest"`` (norms, vectors, biases without a matrix) follow Adam's,
    with momentum 0.9 and no weight decay. A group that would be empty is left out. It
    is a list of dicts: move a parameter, change a rule, delete a group to leave it to
    another optimizer.

    Args:
        model: the module to train.
        rule: of hidden matrices and convolutions; None: the optimizer's. Under a rule
            whose factors do not come from activations biases go to the rest.
        rest: the rule of the others, ``Adam()`` if not given.
        matrices: of hidden weights that are several matrices, one above the other, how
            many: ``{"qkv": 3}`` for layers of that name that make Q, K and V at once,
            ``{"qkv": 3 * heads}`` for one matrix a head. Names are those of modules or
            parameters, whole or without what they are inside of. Such weights, with
            their biases, are a group of their own: ``"hidden in 3"``.
    """
    plain, _ = unwrap(model)
    alone = rule is not None and (rule.source == "gradients" or rule.sides == "none")
    kind = _kinds(plain, biases=not alone)
    others = _as_adam(rest or Adam())
    found = GroupList()
    for name in NAMES:
        named = [(n, p) for n, p in plain.named_parameters() if kind[id(p)] == name]
        chosen = {} if rule is None else {"rule": rule}
        parts = chosen if name in (HIDDEN, CONVOLUTIONS) else others
        for label, own, its in _by_matrices(name, named, matrices or {}):
            found.append({"name": label, "params": its, **parts, **own})
    _require_found(found, matrices or {})
    return found


NamedList = list[tuple[str, nn.Parameter]]


def _by_matrices(
    name: str, named: NamedList, matrices: Mapping[str, int]
) -> Iterator[tuple[str, dict[str, int], NamedList]]:
    """A group, and those of its weights that are several matrices."""
    counts = {n: _asked(n, matrices) if name == HIDDEN else 0 for n, _ in named}
    for count in sorted(set(counts.values())):
        its = [(n, p) for n, p in named if counts[n] == count]
        own = {"matrices": count} if count else {}
        yield f"{name} in {count}" if count else name, own, its


def _asked(parameter: str, matrices: Mapping[str, int]) -> int:
    """How many matrices a parameter's name, or its module's, is given; 0: none."""
    path = parameter.split(".")
    starts = [".".join(path[:i]) for i in range(1, len(path) + 1)]
    return next((matrices[n] for n in [*path, *starts] if n in matrices), 0)


def _require_found(groups: GroupList, matrices: Mapping[str, int]) -> None:
    several = [n for g in groups if "matrices" in g for n, _ in g["params"]]
    for name, count in matrices.items():
        if not any(_asked(n, {name: count}) for n in several):
            raise ValueError(
                f"Invalid name {name!r} of matrices. Must be that of a hidden weight "
                "or of its module."
            )


def groups_by_role(
    model: nn.Module, words: Rule, normalised: Mapping[str, Any]
) -> GroupList:
    """All parameters by the optimizer's rule, in up to three groups.

    Layers that a normalisation follows keep the norm that they began with: it has no
    effect on what the network computes, but growing it shortens their steps. They have
    what ``normalised`` says, as a rule of their own. A
    vocabulary (embeddings, and a last layer with as many outputs as an embedding has
    rows) follows ``words``, unless the model has no other linear layer or convolution.
    """
    vocabulary, inside = _vocabulary(model), _normalised(model)
    named: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        normal = NORMALISED if id(p) in inside else REST
        role = VOCABULARY if id(p) in vocabulary else normal
        named.setdefault(role, []).append((name, p))
    parts = {
        NORMALISED: {"name": NORMALISED, "decay": FixedNorm(), **normalised},
        VOCABULARY: {"name": VOCABULARY, **_as_adam(words)},
    }
    roles = (REST, NORMALISED, VOCABULARY)
    return GroupList(
        [{"params": named[r], **parts.get(r, {})} for r in roles if r in named]
    )


def _vocabulary(model: nn.Module) -> set[int]:
    """Ids of the parameters of a vocabulary, if it is not all that has layers."""
    tables = [m for m in model.modules() if isinstance(m, _EMBEDDINGS)]
    layers = [m for m in model.modules() if isinstance(m, _LAYERS)]
    # Of hidden layers some may have as many outputs as there are positions.
    rows = {t.num_embeddings for t in tables}
    heads = [m for m in layers[-1:] if _features(m) in rows]
    own = {id(p) for m in (*tables, *heads) for p in m.parameters()}
    return set() if all(id(m.weight) in own for m in layers) else own


def _normalised(model: nn.Module) -> set[int]:
    """Ids of the parameters of layers whose scale the next module takes out.

    Such a layer is followed, in the order in which its parent has its modules, by a
    batch, group or instance norm of as many features, before any other module that has
    parameters. (A layer norm usually follows a sum, whose scale counts.)
    """
    found: set[int] = set()
    for parent in model.modules():
        last: nn.Module | None = None
        for child in parent.children():
            if isinstance(child, _NORMS) and _features(child) == _features(last):
                assert last is not None
                found |= {id(p) for p in last.parameters(recurse=False)}
            if next(child.parameters(), None) is not None:
                last = child if isinstance(child, _LAYERS) else None
    return found


def _features(module: nn.Module | None) -> int | None:
    """The size that a norm takes, or that a linear layer or convolution gives."""
    names = "num_features", "num_channels", "out_channels", "out_features"
    return next((getattr(module, n) for n in names if hasattr(module, n)), None)


def _as_adam(rule: Rule) -> dict[str, Any]:
    """What groups that follow Adam's rule have besides it."""
    return {
        "rule": rule,
        "length": Free(),
        "average": AverageGradients(),
        "momentum": 0.9,
        "weight_decay": 0.0,
    }


def _kinds(model: nn.Module, *, biases: bool) -> dict[int, str]:
    """The group of each parameter, by id."""
    kind: dict[int, str] = {}
    last: nn.Module | None = None
    for module in model.modules():
        for p in module.parameters(recurse=False):
            matrix = Matrix.fits(p)
            if isinstance(module, _EMBEDDINGS):
                kind[id(p)] = EMBEDDINGS
            elif matrix and isinstance(module, _CONVOLUTIONS):
                kind.setdefault(id(p), CONVOLUTIONS)
            else:
                kind.setdefault(id(p), HIDDEN if matrix else REST)
        if isinstance(module, nn.Linear) and kind[id(module.weight)] == HIDDEN:
            last = module
    matrices = [k for k in kind.values() if k in (HIDDEN, CONVOLUTIONS)]
    if last is not None and len(matrices) > 1:
        kind |= {id(p): HEAD for p in last.parameters()}
    if biases:
        for module in model.modules():
            row = kind_of(module, LayerOptions())
            names = (row.weight_name, row.bias_name) if row else ("weight", "bias")
            weight, bias = (getattr(module, x, None) for x in names)
            own = kind.get(id(weight), REST)
            if bias is not None and own in (HIDDEN, CONVOLUTIONS):
                kind[id(bias)] = own
    return kind


def parameters_of(model: nn.Module, named: Named) -> list[nn.Parameter]:
    """The parameters that names or modules stand for; a name may be of either."""
    alone = isinstance(named, str | nn.Module)
    several: Iterable[str | nn.Module] = [named] if alone else named
    known = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    found: list[nn.Parameter] = []
    for each in several:
        inside = modules.get(each) if isinstance(each, str) else each
        if isinstance(each, str) and each in known:
            found.append(known[each])
        elif isinstance(inside, nn.Module):
            found += _inside(model, inside)
        else:
            legal = ", ".join([n for n in modules if n][:20])
            raise ValueError(
                f"Invalid name {each!r} of a rule. Must be a module, or the name of a "
                f"module or parameter, as {legal}."
            )
    return found


def _inside(model: nn.Module, module: nn.Module) -> Iterable[nn.Parameter]:
    if not any(module is m for m in model.modules()):
        raise ValueError(
            f"Invalid module of a rule, a {type(module).__name__}. Must be inside of "
            "the model."
        )
    return list(module.parameters())
