"""What ZeRO promises a server rank, and large layers in tiles, in one process."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcfed.server import deepspeed_trainer
from hpcfed.server.networks import Autoencoder, num_parameters
from hpcfed.server.options import ServerOptions, batching
from hpcfed.server.sizes import Size
from hpcfed.server.tiles import TILE, JoinedTiles, SummedTiles, in_tiles, joined
from hpcfed.server.training_plan import RankSlot, TrainingPlan
from hpcfed.server.zero_memory import MemoryPromise, promised_memory

P = 1_200_000_000


@pytest.mark.parametrize(
    ("options", "ranks", "parts"),
    [
        # Stage 0: float32 parameters, gradients and two moments; a copy of 500 million
        # gradients, or of all weights in bfloat16.
        ({}, 1, (4 * P, 4 * P, 8 * P, 2e9)),
        ({"server_precision": "bf16"}, 2, (4 * P, 4 * P, 8 * P, 2 * P)),
        # Stages 1 and 2: a float32 copy and two moments, shared. 50 million gradients
        # in float32 and in bfloat16 are more than two buckets in bfloat16.
        ({"zero_stage": 1, "server_precision": "bf16"}, 4, (2 * P, 2 * P, 3 * P, 3e8)),
        ({"zero_stage": 2, "server_precision": "bf16"}, 4, (2 * P, P / 2, 3 * P, 3e8)),
        ({"zero_stage": 2}, 3, (4 * P, 4 * P / 3, 4 * P, 4e8)),
        # Stage 3: two buckets, and 100 million gathered parameters.
        ({"zero_stage": 3, "server_precision": "bf16"}, 4, (P / 2, P / 2, 3 * P, 4e8)),
        ({"zero_stage": 3}, 2, (2 * P, 2 * P, 6 * P, 8e8)),
        # Offload leaves the device what is computed with at the time.
        ({"zero_stage": 1, "server_offload": "optimizer"}, 2, (4 * P, 4 * P, 0, 4e8)),
        ({"zero_stage": 2, "server_offload": "optimizer"}, 2, (4 * P, 0, 0, 4e8)),
        ({"zero_stage": 3, "server_offload": "parameters"}, 2, (0, 0, 0, 8e8)),
    ],
)
def test_promises_are_worked_out_by_hand(
    options: dict[str, Any], ranks: int, parts: tuple[float, ...]
) -> None:
    promise = promised_memory(P, ServerOptions(**options), ranks)
    assert promise == MemoryPromise(*parts)
    assert promise.total == sum(parts)


def test_buffers_are_hardly_larger_than_a_small_network() -> None:
    options = ServerOptions(zero_stage=3, server_precision="bf16")
    # 1024 numbers a bucket, twice, and 1000 gathered ones.
    assert promised_memory(1000, options, 2).buffers == 2 * (2 * 1024 + 1000)


# Tiles


def test_tiles_are_cut_along_the_longer_side() -> None:
    """Seven lines of 3 numbers into tiles of at most 9: three lines at most in each."""
    wide, tall = in_tiles(nn.Linear(7, 3), 9), in_tiles(nn.Linear(3, 7), 9)
    assert isinstance(wide, SummedTiles) and isinstance(tall, JoinedTiles)
    assert [tile.in_features for tile in wide.input_tiles] == [2, 2, 3]
    assert [tile.out_features for tile in tall.output_tiles] == [2, 2, 3]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(50, 6), (6, 50), (20, 20)])
def test_tiles_are_the_layer_to_rounding(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*shape, bias=bias).double()
    x = torch.randn(5, shape[0], dtype=torch.float64)
    tiles = in_tiles(layer, 77)
    assert max(p.numel() for p in tiles.parameters()) <= 77
    assert num_parameters(tiles) == num_parameters(layer)
    # A sum of 50 products, none above 10, in another order.
    torch.testing.assert_close(tiles(x), layer(x), rtol=0, atol=1e-12)
    tiles(x).square().sum().backward()
    layer(x).square().sum().backward()
    found = dict(joined((name, p.grad) for name, p in _named(tiles)))
    for name, p in layer.named_parameters():
        torch.testing.assert_close(found[f"layer.{name}"], p.grad, rtol=0, atol=1e-10)


def _named(tiles: nn.Module) -> Any:
    return nn.ModuleDict({"layer": tiles}).named_parameters()


def test_a_layer_that_fits_into_one_tile_stays_the_same_module() -> None:
    layer = nn.Linear(6, 5)
    assert in_tiles(layer, 30) is layer


def test_cut_networks_have_the_same_whole_tensors_to_the_bit() -> None:
    torch.manual_seed(3)
    network = Autoencoder(500, Size(4, 16, 2))
    names = {name: p.detach().clone() for name, p in network.named_parameters()}
    state = torch.random.get_rng_state()
    network.cut_large_layers(1000)
    assert torch.equal(torch.random.get_rng_state(), state), "nothing is drawn"
    assert len(list(network.parameters())) > len(names)
    found = dict(joined(network.named_parameters()))
    assert found.keys() == names.keys()
    assert all(torch.equal(found[name], p) for name, p in names.items())


def test_tiles_of_the_large_size_are_small() -> None:
    with torch.device("meta"):
        network = Autoencoder(75_146, Size(512, 1024, 5))
        before = num_parameters(network)
        network.cut_large_layers(TILE)
    assert num_parameters(network) == before > 10**9
    linear = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    # 601,344 inputs in tiles of 16,384 at most: 37 of either layer.
    assert len(linear) == 2 * 37
    assert max(layer.weight.numel() for layer in linear) <= TILE


# Groups of parameters


def groups_of(sizes: list[int], stage: int, ranks: int) -> list[list[int]]:
    """The sizes of the parameters in each group."""
    network = nn.ParameterList(torch.empty(size, device="meta") for size in sizes)
    options = ServerOptions(zero_stage=stage, server_batch=60)
    plan = TrainingPlan(
        options,
        batching(options, ranks, "denoiser"),
        RankSlot(torch.device("cpu"), 0, ranks),
        steps=1,
    )
    groups = deepspeed_trainer._groups(network, plan)
    return [[p.numel() for p in group["params"]] for group in groups]


def test_zero_1_and_2_convert_gradients_group_by_group() -> None:
    """A rank's share of a group is at most 50 million numbers."""
    sizes = [10_000_000] * 12
    assert groups_of(sizes, 2, 1) == [sizes[:5], sizes[:5], sizes[:2]]
    assert groups_of(sizes, 1, 2) == [sizes[:10], sizes[:2]]
    assert groups_of(sizes, 0, 1) == groups_of(sizes, 3, 1) == [sizes]


def test_a_group_has_room_for_several_of_the_largest_parameters() -> None:
    large, small = 30_000_000, 1000
    sizes = [large, small, large, large, large, small]
    assert groups_of(sizes, 2, 1) == [[large, small, large, large], [large, small]]
