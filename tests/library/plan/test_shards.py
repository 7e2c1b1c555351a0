"""Pieces of parameters, and their way to workers and back, as data."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from natgrad.plan import BlockSpec, make_plan
from natgrad.plan.memory import Keeps, memory_of
from natgrad.plan.shards import Cut, Piece, covers, cut_up, make_crates


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
def test_a_parameter_is_cut_as_torch_chunks_it(rows: int) -> None:
    x = torch.arange(rows * 2.0).reshape(rows, 2)
    cut = cut_up(x.shape, [4], range(4), [0])
    chunks = x.chunk(4)
    assert covers(cut)
    assert [piece.ranks for piece in cut.pieces] == [(r,) for r in range(len(chunks))]
    for piece, chunk in zip(cut.pieces, chunks, strict=True):
        assert torch.equal(x[piece.box], chunk)


def test_on_two_axes_copies_are_one_piece_of_several_ranks() -> None:
    cut = cut_up((5, 3), [2, 2], range(4), [-1, 0])
    assert [(p.ranks, p.sizes) for p in cut.pieces] == [
        ((0, 2), (3, 3)),
        ((1, 3), (2, 3)),
    ]
    both = cut_up((4, 6), [2, 2], range(4), [0, 1])
    assert [p.sizes for p in both.pieces] == [(2, 3)] * 4
    assert covers(both)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.PReLU())


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_piece_goes_to_its_worker_and_every_update_back(world: int) -> None:
    plan = make_plan(network(), world=world, gradients="sharded")
    plan.check()
    assert all(len(plan.workers[b.name]) == 1 for b in plan.blocks if b.statistics)
    matrices = [b for b in plan.blocks if not b.elementwise]
    for exchange in ("reduce_gradients", "share_updates"):
        sent, received = plan.exchanges[exchange].volumes()
        assert sum(sent) == sum(received)
        # one gather and one scatter of the matrices, and no more
        assert sum(sent) <= sum(b.elements for b in matrices)
        crates = make_crates(
            plan.exchanges[exchange],
            [i.name for i in plan.exchanges[exchange].items],
            limit=8,
        )
        volumes = [[crate.volume(r) for r in range(world)] for crate in crates]
        for rank in range(world):
            mine = [v[rank] for v in volumes]
            assert sum(a for a, _ in mine) == sent[rank]
            assert sum(b for _, b in mine) == received[rank]


def test_a_plan_that_loses_a_piece_or_counts_an_entry_twice_is_refused() -> None:
    plan = make_plan(network(), world=3, gradients="sharded")
    for name in ("reduce_gradients", "share_updates"):
        exchange = plan.exchanges[name]
        short = replace(exchange, items=exchange.items[1:])
        with pytest.raises(ValueError, match="not given once"):
            replace(plan, exchanges={**plan.exchanges, name: short}).check()
        stray = replace(exchange.items[0], name="stray")
        more = replace(exchange, items=(*exchange.items, stray))
        with pytest.raises(ValueError, match="no piece"):
            replace(plan, exchanges={**plan.exchanges, name: more}).check()
    twice = Cut(
        shape=(2, 2),
        pieces=(
            Piece(ranks=(0,), offsets=(0, 0), sizes=(1, 2)),
            Piece(ranks=(1,), offsets=(0, 0), sizes=(1, 2)),
        ),
    )
    spec = BlockSpec(name="w", stack=1, rows=2, cols=2, cuts=(twice,))
    with pytest.raises(ValueError, match="not each entry"):
        make_plan([spec], world=2, gradients="sharded").check()


def test_state_falls_with_the_world() -> None:
    wide = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)), nn.PReLU(256))
    keeps = Keeps(moments=True, rest_moments=True)

    def most(world: int) -> int:
        plan = make_plan(wide, world=world, gradients="sharded")
        return max(sum(row.values()) for row in memory_of(plan, keeps))

    assert most(2) < 0.6 * most(1)
    assert most(4) < 0.35 * most(1)
