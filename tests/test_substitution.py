"""Calling a network with other tensors, against torch's own way."""

import pytest
import torch
from torch import nn

from hpcfed.models.substitution import Substitution


class _Tied(nn.Module):
    """Two layers with one weight, a buffer, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))) * self.scale


def test_a_network_computes_with_other_tensors_and_keeps_its_own() -> None:
    torch.manual_seed(0)
    network = _Tied().eval()
    own = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    # Not all: `second.weight` follows `first.weight`, and `first.bias` stays.
    names = ("first.weight", "norm.running_mean", "norm.weight", "scale")
    others = {name: torch.randn_like(own[name]) for name in names}
    x = torch.randn(4, 3)
    expected = torch.func.functional_call(network, others, x)
    call = Substitution(network)
    assert call(others, x).equal(expected)
    assert not call({}, x).equal(expected)
    for name, tensor in network.state_dict().items():
        assert tensor.equal(own[name]), name
    # Both names of a tied weight.
    both = {"first.weight": x[:3], "second.weight": 2 * x[:3]}
    call(both, x)
    assert network.first.weight.equal(own["first.weight"])
    with pytest.raises(KeyError):
        call({"scale": others["scale"], "third.weight": x}, x)
    assert network.scale.equal(own["scale"])
