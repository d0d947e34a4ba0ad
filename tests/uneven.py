"""Uneven clients that the engine trains together, and plain torch one by one."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed.clients.engine import Engine
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from tests.naive import make_shard, naive

SIZES = (5, 9, 0, 12, 3)
WITH_DATA = (0, 1, 3, 4)
HARSH = Recipe(2, 4, 0.05, momentum=0.9, weight_decay=0.01, clip=1.0)
TAUT: Any = {"rtol": 1e-10, "atol": 1e-12}


class Case:
    """Uneven clients with rows, references and corrections of their own."""

    def __init__(self, model: str = "cnn-bn", *, device: str = "cpu") -> None:
        self.network = build(model, shape=(1, 8, 8), classes=10, seed=0)
        self.layout = Layout.of(self.network)
        self.shard = make_shard((1, 8, 8), SIZES, torch.float64)
        self.device = device
        first = self.layout.row(self.network, dtype=torch.float64)
        generator = torch.Generator().manual_seed(3)

        def near(scale: float) -> Tensor:
            shape = (len(SIZES), self.layout.num_columns)
            noise = torch.rand(shape, generator=generator, dtype=torch.float64)
            return scale * noise

        self.rows = first + near(0.1)
        self.reference = first + near(0.1)
        self.correction = near(0.5) - 0.25
        self.keys = torch.arange(len(SIZES)) + 77

    def job(self, recipe: Recipe, **more: Any) -> TrainingJob:
        there = {}
        for name in ("inputs", "targets", "index"):
            there[name] = getattr(self.shard, name).to(self.device)
        everyone = np.arange(len(SIZES))
        return TrainingJob(
            self.rows.to(self.device),
            replace(self.shard, **there),
            everyone,
            recipe,
            keys=self.keys.to(self.device),
            **more,
        )

    def engine(self, mode: Any = "batched") -> Engine:
        return Engine(self.network, self.layout, shape=(1, 8, 8), mode=mode)

    def module(self, client: int) -> nn.Module:
        """Return the network with one client's row."""
        network = copy.deepcopy(self.network).double()
        views = self.layout.views(self.rows[client][None])
        own = {name: view[0] for name, view in views.items()}
        network.load_state_dict(network.state_dict() | own)
        return network

    def alone(self, client: int, recipe: Recipe, **more: Any) -> Tensor:
        """Return one client's row, trained alone in plain torch."""
        network = self.module(client)
        trained = naive(network, self.shard, client, recipe, self.keys[client], **more)
        return self.layout.row(trained, dtype=torch.float64)
