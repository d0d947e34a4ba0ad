"""A model of rows in the space that they span: exact, for any number of columns.

n rows span n − 1 dimensions around their mean. The eigenvectors of their Gram matrix
give every row its coordinates: an autoencoder that needs no training and loses nothing.
Only the denoiser of coordinates is trained. A generated row is a combination of banked
ones, made where these lie.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.models.cost import multiply_adds
from hpcfed.runtime import process_group
from hpcfed.server import storage
from hpcfed.server.bank import BankedRound, BankedRows
from hpcfed.server.columns import Columns
from hpcfed.server.diffusion import Schedule
from hpcfed.server.learning import LearningRun, rebuilt_with
from hpcfed.server.networks import TIME_FEATURES, ServerNetwork, time_features
from hpcfed.server.options import ServerOptions
from hpcfed.server.row_model import LatentModel
from hpcfed.server.scaling import SMALLEST, LatentScaling
from hpcfed.server.sizes import Size
from hpcfed.server.storage import SavedServer
from hpcfed.server.training_plan import RankSlot

GROUPS = ("denoiser", "coordinates", "axes", "bank")
"""The groups of tensors in its file."""


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of banked rows, with an axis for each dimension that they span.

    Columns are centred, and divided by the standard deviation of their tensor: weights
    and biases differ by orders of magnitude. All numbers are float64.
    """

    scales: Tensor
    """The standard deviation of each tensor's numbers."""
    places: Tensor
    """[rows, axes]: the coordinates of the banked rows, the widest axis first."""
    weights: Tensor
    """[axes, rows]: the combination of centred rows that is a step along each axis."""

    @classmethod
    def of(cls, bank: BankedRows, *, share: float, most: int | None) -> "Coordinates":
        """Return the coordinates of banked rows.

        Keep the widest axes that have this share of the variance, at most `most`.
        """
        scales = bank.deviations().clamp_min(SMALLEST)
        gram = bank.columns.summed(_gram(bank, scales))
        variances, vectors = torch.linalg.eigh(gram)
        # eigh is ascending.
        variances, vectors = variances.flip(0), vectors.flip(1)
        kept = _num_axes(variances, share, most)
        variances, vectors = variances[:kept], vectors[:, :kept]
        # The sign of an axis is arbitrary: put its farthest row on the positive side.
        farthest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        vectors = vectors * farthest.sign()
        # Zero if all rows agree: then a step along the axis changes nothing.
        lengths = variances.clamp_min(0).sqrt()
        if bank.columns.shared:
            # Eigenvectors of close eigenvalues may differ between ranks: take those of
            # the first.
            for found in (vectors, lengths):
                if process_group.rank():
                    found.zero_()
                process_group.allreduce(found)
        inverse = (1 / lengths).where(lengths > 0, 0.0)
        return cls(scales, vectors * lengths, (vectors * inverse).T)

    def check(self, rows: int, tensors: int) -> None:
        """Refuse coordinates of other rows or tensors; they come from a file."""
        axes = self.places.shape[-1]
        shapes = (self.scales.shape, self.places.shape, self.weights.shape)
        if shapes != ((tensors,), (rows, axes), (axes, rows)):
            raise ValueError("its coordinates are of other rows")

    def of_rows(self, bank: BankedRows, rows: Tensor) -> Tensor:
        """Return the coordinates of any rows; what lies outside the space is lost."""
        products = self.places.new_zeros(len(rows), len(bank))
        for block in bank.blocks():
            mean = block.rows.mean(0)
            there = (block.rows - mean) / self.scales[block.tensor]
            here = (rows[:, block.at].double() - mean) / self.scales[block.tensor]
            products += here @ there.T
        return bank.columns.summed(products) @ self.weights.T

    def combinations(self, coordinates: Tensor) -> Tensor:
        """Return the weights of banked rows whose sum has these coordinates."""
        centred = coordinates.double() @ self.weights
        # The rows' mean is added, and was subtracted from each row.
        rest = 1 - centred.sum(1, keepdim=True)
        return centred + rest / len(self.places)


def _gram(bank: BankedRows, scales: Tensor) -> Tensor:
    """Return the inner products of all centred rows, over this rank's columns."""
    # In float64: the products of the widest axis would bury those of small ones.
    gram = scales.new_zeros(len(bank), len(bank))
    for block in bank.blocks():
        centred = (block.rows - block.rows.mean(0)) / scales[block.tensor]
        gram.addmm_(centred, centred.T)
    return gram


def _num_axes(variances: Tensor, share: float, most: int | None) -> int:
    """Return how many of the widest axes to keep; at least one."""
    # What rounding leaves of axes without any variance, such as that of the mean.
    floor = variances[0] * len(variances) * torch.finfo(variances.dtype).eps
    spanned = int((variances > floor).sum())
    if share < 1:
        explained = variances[:spanned].cumsum(0) / variances[:spanned].sum()
        spanned = min(spanned, int((explained < share).sum()) + 1)
    if most is not None:
        spanned = min(spanned, most)
    return max(1, spanned)


class CoordinateDenoiser(ServerNetwork):
    """Predicts ε(z, t) of coordinates: what an ideal denoiser of Gaussian data would
    say, and a residual network's correction of it.

    The axes' variances differ by orders of magnitude. So the network sees coordinates
    of variance 1, and its answer is scaled to what is left to predict on each axis.
    """

    def __init__(self, variances: Tensor, size: Size, schedule: Schedule) -> None:
        """Build a denoiser of coordinates with these variances."""
        super().__init__()
        axes = len(variances)
        # Not buffers: DeepSpeed would round them to bfloat16.
        self._variances = variances.float()
        self._alpha_bars = schedule.alpha_bars.float()
        self.time = nn.Sequential(
            nn.Linear(TIME_FEATURES, size.width),
            nn.SiLU(),
            nn.Linear(size.width, size.width),
        )
        self.first = nn.Linear(axes, size.width)
        self.stages = nn.ModuleList(
            _ResidualStage(size.width) for _ in range(size.depth)
        )
        self.last = nn.Linear(size.width, axes)
        # It begins as the ideal denoiser of Gaussian data.
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.widest = max(axes, 2 * size.width)
        self.activations = 2 * axes + size.width * (2 + 4 * size.depth)

    def flops(self) -> int:
        linear = [layer for layer in self.modules() if isinstance(layer, nn.Linear)]
        return 2 * sum(multiply_adds(layer) for layer in linear)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        alpha_bar = self._alpha_bars[t].unsqueeze(-1)
        signal = alpha_bar * self._variances
        noise = 1 - alpha_bar
        total = signal + noise
        dtype = self.first.weight.dtype
        time = self.time(time_features(t).to(dtype))
        x = self.first((z / total.sqrt()).to(dtype)) + time
        for stage in self.stages:
            x = self.checkpoint(stage, x)
        correction = self.last(F.silu(x)).float()
        return noise.sqrt() * z / total + (signal / total).sqrt() * correction


class _ResidualStage(nn.Module):
    """Norm, two linear layers with an activation between, and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.silu(self.widen(self.norm(x)))
        y: Tensor = x + self.narrow(wide)
        return y


class SpanDiffusion(LatentModel):
    """A denoiser of rows' coordinates in the space that the bank spans.

    It keeps the rows that it has learnt from, since it generates combinations of them.
    Rows have this server rank's columns only.
    """

    denoiser: CoordinateDenoiser

    def __init__(
        self,
        columns: Columns,
        options: ServerOptions,
        slot: RankSlot,
        *,
        seed: int,
    ) -> None:
        super().__init__(options, slot, seed=seed)
        self._columns = columns
        self._bank: BankedRows | None = None
        self._coordinates: Coordinates | None = None
        if options.server_load:
            self.load(Path(options.server_load))

    def _learn_latents(self, bank: BankedRows, run: LearningRun) -> Tensor:
        with run.phase("encode"):
            self._bank = bank
            found = run.half.once("coordinates", lambda: vars(self._found(bank)))
            with run.half.restoring():
                self._coordinates = Coordinates(**found)
                self._coordinates.check(len(bank), len(self._columns.widths))
            return self._coordinates.places

    def _found(self, bank: BankedRows) -> Coordinates:
        return Coordinates.of(
            bank,
            share=self.options.span_variance,
            most=self.options.server_latent,
        )

    def _denoiser_for(self, z: Tensor) -> CoordinateDenoiser:
        # New in every learning, because its axes are.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.streams.seed("initial weights"))
            return self._new_denoiser()

    def _new_denoiser(self) -> CoordinateDenoiser:
        assert self._coordinates is not None and self.latent_scaling is not None
        z = self.latent_scaling(self._coordinates.places)
        return CoordinateDenoiser(z.square().mean(0), self.options.size, self.schedule)

    def raw_latents(self, rows: Tensor) -> Tensor:
        assert self._bank is not None and self._coordinates is not None
        return self._coordinates.of_rows(self._bank, rows)

    def latents_at(self, bank: BankedRows, places: np.ndarray) -> Tensor:
        # Known from learning: no further pass through the bank.
        assert self.latent_scaling is not None and self._coordinates is not None
        return self.latent_scaling(self._coordinates.places[places])

    def from_raw(self, latents: Tensor) -> Tensor:
        assert self._bank is not None and self._coordinates is not None
        return self._bank.combined(self._coordinates.combinations(latents))

    # Files. server.h5 has the rows, too; a checkpoint has them in its bank.

    def save(self, path: Path, start: Tensor | None = None) -> None:
        assert self._bank is not None
        # Every rank hands its columns to the one that writes.
        rows = []
        for place in range(len(self._bank)):
            row = self._bank.at(np.array([place]))
            whole = self._columns.whole(row)
            if self.slot.rank == 0:
                rows.append(whole.cpu())
        if self.slot.rank == 0:
            clients = torch.from_numpy(self._bank.uploaders).double()
            bank = {"rows": torch.cat(rows), "clients": clients}
            self._write(path, {**self._groups(), "bank": bank}, start)

    def store(self, path: Path, bank: BankedRows) -> None:
        if self.slot.rank == 0:
            # Of a model whose rows have left the bank only the count of learnings is
            # needed: the next learning begins anew.
            current = self._bank is not None and self._bank.same_as(bank)
            self._write(path, self._groups() if current else {}, None)

    def _groups(self) -> dict[str, dict[str, Tensor]]:
        assert self._coordinates is not None and self.latent_scaling is not None
        return {
            "denoiser": self.denoiser.state_dict(),
            "coordinates": vars(self._coordinates),
            "axes": vars(self.latent_scaling),
        }

    def _write(
        self, path: Path, groups: dict[str, dict[str, Tensor]], start: Tensor | None
    ) -> None:
        saved = SavedServer(groups, self.streams.learnings, start)
        storage.write(path, saved, self._columns.widths, self.options)

    def load(self, path: Path) -> None:
        self._load(path, None)

    def restore(self, path: Path, bank: BankedRows) -> None:
        self._load(path, bank)

    def _load(self, path: Path, bank: BankedRows | None) -> None:
        """Load a saved model; take rows that the file does not have from `bank`."""
        device, widths = self.slot.device, self._columns.widths
        with storage.refusing(path):
            saved = storage.read(path, widths, self.options, device, GROUPS)
            self.streams.learnings = saved.learnings
            self.start = saved.start
            groups = saved.groups
            if bank is not None and not groups:
                return
            if bank is None:
                bank = _saved_bank(groups["bank"], self._columns)
            self._bank = bank
            self._coordinates = Coordinates(**groups["coordinates"])
            self._coordinates.check(len(bank), len(widths))
            latents = LatentScaling(**groups["axes"])
            storage.check_scaling(latents, self._coordinates.places.shape[1])
            self.latent_scaling = latents
            denoiser = rebuilt_with(groups["denoiser"], self._new_denoiser)
        self.denoiser = denoiser.to(device)


def _saved_bank(saved: dict[str, Tensor], columns: Columns) -> BankedRows:
    rows, clients = saved["rows"], saved["clients"]
    if rows.shape != (len(clients), columns.num_all):
        raise ValueError("its rows are of other columns")
    banked = BankedRound(clients.cpu().long().numpy(), columns.of(rows))
    return BankedRows([banked], columns)
