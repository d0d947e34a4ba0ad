"""DP-SGD within clients (Abadi et al. 2016, Algorithm 1): every sample's gradient is
clipped to norm C, and each step adds Gaussian noise of deviation z × C to their sum.

Every sample has its own gradient, so samples must not interact, as they do in batch
norm. Clients train one after the other, and torch.func computes all gradients of a
minibatch at once. Minibatches are as in any training: each epoch visits a client's
samples in another order, each of them in one step. So an epoch is one release of a
sample, however many steps it has, and is counted as one. There is no privacy gain by
subsampling.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hpcfed.clients.fisher import Fisher
from hpcfed.clients.job import EngineAccess, Losses, RowEngine, TrainingJob
from hpcfed.clients.schedule import training_samples
from hpcfed.errors import UserError
from hpcfed.models.layout import Layout
from hpcfed.models.own import answers
from hpcfed.runtime import randomness

# Streams of a client's key: the order of samples is the same as in any training.
_ORDER, _NOISE = 0, 3

Count = Callable[[np.ndarray, np.ndarray], None]
"""Takes positions of clients, and how often each of their samples was trained on."""


class PrivateSteps(EngineAccess):
    """An engine that trains by DP-SGD, and leaves all else to another engine."""

    def __init__(
        self,
        engine: RowEngine,
        network: nn.Module,
        *,
        clip: float,
        multiplier: float,
        count: Count,
    ) -> None:
        super().__init__(engine)
        # A copy, because it is moved to the rows' device.
        self._network = copy.deepcopy(network).train()
        self._clip = clip
        self._multiplier = multiplier
        self._count = count
        self._samples = 0
        _check_network(network)
        _check_layout(self.layout, network)

    @property
    def samples(self) -> int:
        return self._engine.samples + self._samples

    @property
    def fisher(self) -> Fisher:
        raise UserError(
            "--sample-noise would not hold: this method computes Fisher information "
            "of clients' data, and no noise is added to it"
        )

    def train(self, job: TrainingJob) -> tuple[Tensor, Losses]:
        """Train each row on its client's data, and count the uses of samples."""
        _check_job(job)
        self._samples += int(job.num_samples().sum())
        steps = job.num_steps()
        length = job.recipe.length
        sizes = job.shard.samples[job.clients]
        per_epoch = np.maximum(length.steps_per_epoch(sizes) * length.repeat, 1)
        # An epoch that has begun may have used any sample, so it counts in full.
        self._count(job.clients, -(-steps // per_epoch) * length.repeat)
        trained = job.rows.clone()
        means = trained.new_full((len(trained),), torch.nan)
        seen = torch.zeros(len(trained), dtype=torch.int64, device=trained.device)
        for i in np.flatnonzero(steps):
            means[i], seen[i] = self._train_one(job, int(i), int(steps[i]), trained[i])
        return trained, Losses(means, seen)

    def _train_one(
        self, job: TrainingJob, i: int, steps: int, row: Tensor
    ) -> tuple[Tensor, int]:
        """Train a row in place; return its mean loss, and the number of its samples."""
        recipe, shard = job.recipe, job.shard
        client = slice(int(job.clients[i]), int(job.clients[i]) + 1)
        size = int(shard.samples[client][0])
        epochs = -(-steps // (-(-size // recipe.batch_size) * recipe.repeat))
        samples, counts = training_samples(
            shard.index[client],
            torch.tensor([size], device=row.device),
            randomness.child_keys(job.keys[i : i + 1], _ORDER),
            recipe.length,
            epochs=epochs,
            steps=steps,
        )
        noise_keys = randomness.child_keys(job.keys[i : i + 1], _NOISE)
        # A view: steps below change the caller's row in place.
        parameters = row[: self.layout.num_parameters]
        velocity = torch.zeros_like(parameters)
        total, seen = row.new_zeros(()), 0
        for step, number in enumerate(counts[:, 0].tolist()):
            batch = samples[step, 0, :number]
            gradients, losses = self._of_samples(
                row, shard.inputs[batch], shard.targets[batch]
            )
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            # A gradient of 0 stays 0. One that is not finite is dropped, since no noise
            # would hide it.
            factors = (self._clip / norms).clamp(max=1)
            gradient = (gradients * factors).where(norms.isfinite(), 0).sum(0)
            key = randomness.child_keys(noise_keys, step)
            noise = randomness.normal(key, len(gradient))[0].to(gradient.dtype)
            # Noise belongs to the sum, before the division: replacing a sample changes
            # the sum by 2 C at most, whatever the size of the batch.
            gradient += self._multiplier * self._clip * noise
            gradient = gradient / number + recipe.weight_decay * parameters
            velocity = recipe.momentum * velocity + gradient
            if recipe.nesterov:
                change = recipe.lr * (gradient + recipe.momentum * velocity)
            else:
                change = recipe.lr * velocity
            if job.columns is not None:
                mask = job.columns[: len(parameters)].to(row.device)
                change = change.where(mask, 0)
            parameters -= change
            total, seen = total + losses.sum(), seen + number
        return total / seen, seen

    def _of_samples(
        self, row: Tensor, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return each sample's gradient, [samples, parameters], and the losses."""
        network = self._network.to(row.device, row.dtype)
        # Each sample gets its own copy of the row, and so its own gradient.
        # torch.func.grad would do the same, but load torch's compiler first.
        rows = row.detach().expand(len(inputs), -1)
        leaves = {
            name: view.detach().requires_grad_()
            for name, view in self.layout.views(rows).items()
        }

        def loss(tensors: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
            outputs = functional_call(network, tensors, (x[None],))
            return F.cross_entropy(answers(outputs), target[None])

        try:
            losses = vmap(loss)(leaves, inputs, targets)
            found = torch.autograd.grad(losses.sum(), list(leaves.values()))
        except RuntimeError as error:
            raise UserError(
                "--sample-noise needs a network whose samples torch.func.vmap can tell "
                f"apart: {str(error).splitlines()[0]}"
            ) from None
        flat = [gradient.flatten(1) for gradient in found]
        return torch.cat(flat, 1), losses.detach()


def _check_network(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm):
            raise UserError(
                f"--sample-noise would not hold: batch norm ({name}) mixes the "
                "samples of a minibatch; use a network without it, such as --model "
                "mlp"
            )
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise UserError(f"--sample-noise does not work with dropout ({name})")


def _check_layout(layout: Layout, network: nn.Module) -> None:
    buffers = {name for name, _ in network.named_buffers()}
    untrained = [e.name for e in layout.entries if not e.trainable]
    if buffers.intersection(untrained):
        raise UserError(
            "--sample-noise would not hold: this network has buffers that "
            "training changes without gradients, and no noise is added to them"
        )
    if untrained:
        raise UserError(
            "--sample-noise does not work where rows hold frozen parameters "
            f"({untrained[0]}); leave out --send-frozen, and methods that need it"
        )


def _check_job(job: TrainingJob) -> None:
    recipe = job.recipe
    more = {
        "pull rows to others": job.pull is not None,
        "correct gradients": job.correction is not None,
        "gate channels": job.gates is not None,
        "have rates of their own": job.rates is not None,
        "ask for gradients": recipe.gradient,
    }
    for deed, asked in more.items():
        if asked:
            raise UserError(
                "--sample-noise needs plain local SGD, but clients of this method "
                f"{deed}; use --method fedavg"
            )
