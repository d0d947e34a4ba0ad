"""Not a test: server ranks train through DeepSpeed in many ways while a worker goes on,
and all write what came out.

The loop to compare with is written here once more, from what training ought to be, and
shares no code with it. Alone, without MPI, one process has the whole latent diffusion
model learn by both engines.
"""

import gc
import math
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcfed.runtime import world as worlds
from hpcfed.server import deepspeed_trainer, tiles
from hpcfed.server.bank import BankedRows
from hpcfed.server.deepspeed_trainer import DeepSpeedTrainer
from hpcfed.server.engines import import_engine, make_trainer, recomputing
from hpcfed.server.latent_diffusion import LatentDiffusion
from hpcfed.server.networks import Autoencoder, Denoiser
from hpcfed.server.options import ServerOptions, batching
from hpcfed.server.trainer import Loss, Parts, Trainer
from hpcfed.server.training_plan import RankSlot, TrainingPlan

COLUMNS = 999
LENGTH, HALF = (
    9,
    3,
)  # steps of the cosine, and of each of the two parts that are trained
BATCH, LR, DECAY = 16, 5e-3, 0.1
# The two linear layers have more than 10^5 weights in each of two tiles: fewer would
# never leave a rank under ZeRO 3.
SIZE = {"server": "small", "server_width": 8, "server_latent": 256, "server_depth": 2}
TILE = 2**17
WAYS: dict[str, dict[str, Any]] = {
    **{f"zero {stage}": {"zero_stage": stage} for stage in range(4)},
    "offloaded parameters": {"zero_stage": 3, "server_offload": "parameters"},
    "bf16": {"server_precision": "bf16"},
    "bf16 zero 1": {"zero_stage": 1, "server_precision": "bf16"},
    "zero 0 accumulated": {"server_micro_batch": 4},
    "zero 2 accumulated": {"zero_stage": 2, "server_micro_batch": 4},
    "zero 3 accumulated, checkpointed": {
        "zero_stage": 3,
        "server_micro_batch": 4,
        "server_checkpointing": True,
    },
    "checkpointed": {"server_checkpointing": True},
    "offloaded optimizer": {"zero_stage": 2, "server_offload": "optimizer"},
    "bf16 zero 3": {"zero_stage": 3, "server_precision": "bf16"},
    "zero 3 in tiles": {"zero_stage": 3},
}

Told = dict[str, np.ndarray]


def options_of(**changed: Any) -> ServerOptions:
    return ServerOptions(
        **{
            **SIZE,
            "server_batch": BATCH,
            "server_lr": LR,
            "server_decay": DECAY,
            **changed,
        }
    )


def network(seed: int) -> Autoencoder:
    torch.manual_seed(seed)
    model = Autoencoder(COLUMNS, options_of().size, input_noise=0.001, latent_noise=0.1)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.add_(torch.rand(buffer.shape))  # as if it had learnt before
    return model


def loss_of(micro: int) -> Loss:
    rows = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(5))

    def loss(called: Any, step: int, number: int) -> Tensor:
        random = torch.Generator().manual_seed(1000 * step + number)
        batch = rows[torch.randint(len(rows), (micro,), generator=random)]
        latent = torch.randn(micro, options_of().size.latent, generator=random)
        return called(batch, (torch.randn(batch.shape, generator=random), latent))

    return loss


def flat(tensors: dict[str, Tensor], *, buffers: bool) -> np.ndarray:
    """Weights, or what batch norm has seen."""
    there = {
        name: t.detach().float().flatten()
        for name, t in sorted(tensors.items())
        if "batches" not in name
    }
    return torch.cat(
        [t for name, t in there.items() if ("running" in name) is buffers]
    ).numpy()


def reference(micro: int, *, shared: bool) -> Told:
    """Every micro-batch of a step on this rank alone: one after the other, or `shared`
    as one batch.
    """
    model, loss, parts = network(0), loss_of(micro), BATCH // micro

    def together(step: int) -> Tensor:
        """The loss of what all micro-batches give to the network."""
        given: list[Any] = []
        for number in range(parts):
            loss(lambda *inputs: given.append(inputs) or torch.zeros(()), step, number)
        rows = torch.cat([batch for batch, _ in given])
        return model(
            rows,
            (torch.cat([n[0] for _, n in given]), torch.cat([n[1] for _, n in given])),
        )

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    losses = []
    for step in range(2 * HALF):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 + math.cos(math.pi * step / LENGTH)) / 2
        values = (
            [together(step)]
            if shared
            else [loss(model, step, number) for number in range(parts)]
        )
        optimizer.zero_grad()
        torch.stack(values).mean().backward()
        optimizer.step()
        losses.append(sum(value.item() for value in values) / len(values))
    told = {
        "losses": np.array(losses),
        "weights": flat(dict(model.named_parameters()), buffers=False),
    }
    return told | {"statistics": flat(model.state_dict(), buffers=True)}


def held(learning: Trainer) -> Told:
    """Elements that this rank itself holds: of one moment, and of parameters."""
    assert isinstance(learning, DeepSpeedTrainer)
    states = getattr(
        learning._optimizer, "optimizer", learning._optimizer
    ).state.values()
    parameters = list(learning.network.parameters())
    moments = sum(state["exp_avg"].numel() for state in states)
    return {
        "held": np.array([moments, sum(p.numel() for p in parameters)]),
        "parameters": np.array(
            sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        ),
        "tensors": np.array(len(parameters)),
    }


def tensors_of(learning: Trainer) -> dict[str, Tensor]:
    """Copies, which stay as they are while training goes on."""
    return {name: tensor.clone() for name, tensor in learning.tensors()}


def gathered(model: Autoencoder, stage: int) -> AbstractContextManager[None]:
    """Within, every rank can call the network for itself; afterwards ZeRO 3 has shared
    out all parameters, also small ones that it leaves whole between two steps.
    """
    if stage < 3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def trained(changed: dict[str, Any], slot: RankSlot) -> Told:
    """Two parts of training, one after the other."""
    options = options_of(**changed)
    divided = batching(options, slot.size, "autoencoder")
    loss = loss_of(divided.micro)
    model = network(0)
    if options.server_checkpointing:
        model.checkpoint = recomputing(options)
    plan = TrainingPlan(options, divided, slot, steps=LENGTH)
    learning = make_trainer(model, plan)
    begun = tensors_of(learning)
    first = learning.fit(loss, HALF, lambda done, losses: None)
    kept = {(kind, name): part.clone() for kind, name, part in learning.state()}
    second = learning.fit(loss, HALF, lambda done, losses: None)
    rows = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(6))
    with torch.no_grad(), gathered(model, options.zero_stage):
        latents = model.encode(rows)
    ended = tensors_of(learning)
    told = {
        "losses": np.concatenate([first, second]),
        "weights": flat(ended, buffers=False),
        "first statistics": flat(begun, buffers=True),
        "statistics": flat(ended, buffers=True),
        "latents": latents.numpy(),
    }
    told |= held(learning)
    learning.close()
    return told | resumed(plan, loss, lambda *of: kept[of])


def resumed(plan: TrainingPlan, loss: Loss, state: Parts) -> Told:
    """The second part, by a trainer that goes on from a state, with another network."""
    model = network(1)
    if plan.options.server_checkpointing:
        model.checkpoint = recomputing(plan.options)
    learning = make_trainer(model, plan)
    learning.resume(HALF, state)
    losses = learning.fit(loss, HALF, lambda done, losses: None)
    tensors = tensors_of(learning)
    learning.close()
    return {
        "resumed losses": losses,
        "resumed weights": flat(tensors, buffers=False),
        "resumed statistics": flat(tensors, buffers=True),
    }


def checkpointed(engine: str) -> Told:
    """Loss and gradients of both networks, and batch norm's statistics after, with
    activations computed anew.
    """
    options = options_of(server_engine=engine or "torch")
    random = torch.Generator().manual_seed(7)
    rows, z = (
        torch.randn(6, COLUMNS, generator=random),
        torch.randn(6, 16, generator=random),
    )
    t = torch.randint(1, 1001, (6,), generator=random)
    autoencoder = network(2)
    denoiser = Denoiser(options.size)
    if engine:
        autoencoder.checkpoint = denoiser.checkpoint = recomputing(options)
    losses = [autoencoder(rows), denoiser(z, t).square().mean()]
    torch.stack(losses).sum().backward()
    parameters = [*autoencoder.parameters(), *denoiser.parameters()]
    gradients = [
        torch.full_like(p, torch.nan) if p.grad is None else p.grad for p in parameters
    ]
    return {
        "losses": np.array([loss.item() for loss in losses]),
        "gradients": torch.cat([g.flatten() for g in gradients]).numpy(),
        "statistics": flat(autoencoder.state_dict(), buffers=True),
    }


def rows_of_clients() -> Tensor:
    """Five clients, eight uploads each."""
    random = torch.Generator().manual_seed(8)
    base, own = (
        torch.randn(96, generator=random),
        torch.randn(5, 1, 96, generator=random),
    )
    return (
        base + 0.02 * own + 0.003 * torch.randn(5, 8, 96, generator=random)
    ).flatten(0, 1)


def diffused(slot: RankSlot, **changed: Any) -> Told:
    """The whole model, learnt and used."""
    small = {
        "server_width": 4,
        "server_latent": 8,
        "server_depth": 3,
        "server_decay": 0.0,
        "diffusion_steps": 50,
    }
    counts = {
        "autoencoder_samples": 5 * BATCH,
        "denoiser_samples": 5 * BATCH,
        "inversion_depth": 10,
    }
    model = LatentDiffusion(
        [64, 32], options_of(**small, **counts, **changed), slot, seed=3
    )
    report = model.learn(BankedRows.of(rows_of_clients(), [64, 32]))
    gc.collect()
    left = [one for one in gc.get_objects() if type(one).__name__ == "DeepSpeedEngine"]
    return {
        "engines left": np.array(len(left)),
        **{f"{name} losses": losses for name, losses in report.losses.items()},
        "inverted": model.invert(rows_of_clients()[:6]).numpy(),
        "sampled": model.sample(4).numpy(),
    }


def serve(world: worlds.World) -> Told:
    slot = RankSlot.of(world)
    import_engine(options_of(), world.device)
    import deepspeed

    told = {
        "worlds": np.array(
            [
                dist.get_world_size(),
                deepspeed.comm.get_world_size(),
                deepspeed.comm.get_rank(),
            ]
        )
    }
    parts = {"initial": {"statistics": flat(network(0).state_dict(), buffers=True)}}
    parts |= {
        "reference accumulated": reference(4, shared=False),
        "reference": reference(8, shared=True),
    }
    parts |= {
        f"checkpoint {engine}".strip(): checkpointed(engine)
        for engine in ("", "torch", "deepspeed")
    }
    parts["model"] = diffused(slot, zero_stage=2, server_checkpointing=True)
    parts["model of zero 3"] = diffused(slot, zero_stage=3)
    parts["model alone"] = diffused(RankSlot(world.device), server_engine="torch")
    parts["model of micro-batches"] = diffused(slot, server_micro_batch=8)
    parts["model of micro-batches alone"] = diffused(
        RankSlot(world.device), server_engine="torch", server_micro_batch=8
    )
    for name, changed in WAYS.items():
        tile = TILE if "tiles" in name else tiles.TILE
        with patch.object(deepspeed_trainer, "TILE", tile):
            parts[name] = trained(changed, slot)
    return told | {
        f"{name}/{key}": value
        for name, part in parts.items()
        for key, value in part.items()
    }


def work(world: worlds.World) -> Told:
    """Gradient descent to the mean of some numbers, until a server rank says that it
    has ended.
    """
    there, numbers = torch.zeros(()), torch.arange(9.0)
    steps = 0
    while not world.comm.Iprobe():
        there = there - 0.1 * (there - numbers).mean()
        steps += 1
        time.sleep(0.05)
    world.comm.recv()
    return {
        "steps": np.array(steps),
        "there": there.numpy(),
        "joined": np.array(dist.is_initialized()),
        "deepspeed": np.array("deepspeed" in sys.modules),
    }


def main(world: worlds.World, folder: Path) -> None:
    if world.alone:
        world.join_alone()
        engines = {
            engine: diffused(RankSlot(world.device), server_engine=engine)
            for engine in ("torch", "deepspeed")
        }
        told = {
            f"{engine}/{key}": value
            for engine, part in engines.items()
            for key, value in part.items()
        }
    elif world.role == "server":
        told = serve(world)
        if world.role_rank == 0:
            world.comm.send("ended", 0)
    else:
        told = work(world)
    np.savez(folder / f"{world.role}-{world.role_rank}.npz", **told)  # type: ignore[arg-type]
    world.barrier_all_roles()
    world.close()


if __name__ == "__main__":
    entered = worlds.enter(device="cpu", server_ranks=2)
    try:
        main(entered, Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        entered.abort(1)  # or the others would wait for this rank
        raise
