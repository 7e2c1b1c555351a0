"""Optimizers that are copied or pickled: refused in words, as hooks do not travel."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.toys import mlp, train

import natgrad

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}
WHAT_TO_DO = r"cannot be copied or pickled.*\n?.*state_dict\(\)"


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("make", [natgrad.SPNGD, natgrad.Polar])
def test_a_copied_optimizer_is_refused(make: Any, how: str) -> None:
    model = mlp()
    with make(model, lr=0.1) as optimizer:
        with pytest.raises(TypeError, match=f"^{make.__name__} {WHAT_TO_DO}"):
            COPIES[how](optimizer)
        with pytest.raises(TypeError, match=WHAT_TO_DO):
            COPIES["deepcopy"]((model, optimizer))
        train(model, optimizer, range(1))


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_host_would_train_without_kfac_and_is_refused(how: str) -> None:
    model = mlp()
    host = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with natgrad.KFAC(model, host) as kfac:
        with pytest.raises(TypeError, match=f"^KFAC {WHAT_TO_DO}"):
            COPIES[how](kfac)
        with pytest.raises(TypeError, match=rf"^This SGD, .*KFAC, {WHAT_TO_DO}"):
            COPIES[how](host)
        with pytest.raises(TypeError, match=r"^This SGD"):
            copy.deepcopy((model, host))
        train(model, host, range(1))
    COPIES[how](host).step()  # closed, it is any optimizer again


def test_what_the_error_advises_goes_on_as_the_original() -> None:
    model = mlp()
    optimizer = natgrad.Polar(model, lr=0.1)
    train(model, optimizer, range(1))
    twin = copy.deepcopy(model)
    other = natgrad.Polar(twin, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (twin, other)):
        train(*each, range(1, 3))
    for one, same in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, same)
