"""A model of rows as sequences of tokens, for rows of any length.

Rows are cut into tokens, tensor by tensor, and a transformer denoises them. Its size
does not depend on the number of columns. Long rows pass through it in windows, each by
itself: what a window becomes does not depend on the others.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpcfed.kernels import cuda
from hpcfed.server import storage
from hpcfed.server.bank import BankedRows
from hpcfed.server.columns import Columns
from hpcfed.server.learning import LearningRun, rebuilt_with
from hpcfed.server.losses import token_loss
from hpcfed.server.networks import in_chunks
from hpcfed.server.options import ServerOptions, batching
from hpcfed.server.row_model import RowModel
from hpcfed.server.scaling import SMALLEST, RowScaling
from hpcfed.server.span import Coordinates
from hpcfed.server.storage import SavedServer
from hpcfed.server.token_denoiser import TokenDenoiser
from hpcfed.server.token_layout import TokenLayout
from hpcfed.server.trainer import Loss
from hpcfed.server.training_plan import RankSlot

GROUPS = ("denoiser", "standard")
"""The groups of tensors in its file."""
AT_ONCE = 2**30
"""The most numbers of rows that are generated together, with the noise of all steps: 4
GiB.
"""


class TokenDiffusion(RowModel):
    """A transformer that denoises the standardised numbers of rows.

    The bank has this server rank's columns only. A window of a row, or a whole row, is
    put together where it is needed.
    """

    denoiser: TokenDenoiser

    def __init__(
        self, columns: Columns, options: ServerOptions, slot: RankSlot, *, seed: int
    ) -> None:
        super().__init__(options, slot, seed=seed)
        self._columns = columns
        self._layout = TokenLayout.of(
            columns.widths,
            length=options.size.latent,
            window=options.token_window,
            device=slot.device,
        )
        self.row_scaling: RowScaling | None = None
        # Restore the global random stream afterwards: other code relies on it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.streams.seed("initial weights"))
            self.denoiser = self._new_denoiser()
        if options.server_load:
            self.load(Path(options.server_load))

    @property
    def is_trained(self) -> bool:
        return self.row_scaling is not None

    # Learning

    def _denoising(self, bank: BankedRows, run: LearningRun) -> Loss:
        with run.phase("encode"):
            self.row_scaling = _scaling_of(bank)
        return token_loss(
            lambda rows, first: self._windows(bank, rows, first),
            batching(self.options, self.slot.size, "denoiser"),
            self.streams.draws("denoiser"),
            self.streams.draws("windows", torch.device("cpu")),
            schedule=self.schedule,
            num_rows=len(bank),
            num_starts=self._layout.tokens - self._layout.window + 1,
            filled=self._columns.num_all / len(self._layout.at),
        )

    def _windows(
        self, bank: BankedRows, rows: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return standardised windows of banked rows, and which of their numbers are
        columns. Indices are on the host, so that nobody waits for the device.
        """
        layout, columns, scaling = self._layout, self._columns, self.row_scaling
        assert scaling is not None
        # The columns of a window follow each other. Every rank puts in its own.
        numbers = scaling.mean.new_zeros(len(rows), layout.width)
        begins = layout.begins[first]
        ends = layout.begins[first + layout.window]
        spans = zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for into, (row, begin, end) in zip(numbers, spans, strict=True):
            bank.copy_part(row, slice(begin, end), into)
        numbers = columns.summed(numbers)
        at = layout.window_at(first.to(numbers.device))
        real = at >= 0
        # Of numbers that are not columns any will do: they are masked.
        inside = (at - begins.to(at.device).unsqueeze(1)).clamp_min(0)
        at = at.clamp_min(0)
        x = (numbers.gather(1, inside) - scaling.mean[at]) / scaling.scale[at]
        return x * real, real

    def _new_denoiser(self) -> TokenDenoiser:
        return TokenDenoiser(self._layout, self.options.size, self.schedule)

    # Generating

    def encode(self, rows: Tensor) -> Tensor:
        assert self.row_scaling is not None
        return self._layout.cut(self.row_scaling(rows))

    def decode(self, latents: Tensor) -> Tensor:
        assert self.row_scaling is not None
        return self.row_scaling.undo(self._layout.joined(latents))

    def latents_at(self, bank: BankedRows, places: np.ndarray) -> Tensor:
        # Whole rows could be too many numbers. Their coordinates lie alike.
        return Coordinates.of(bank, share=1.0, most=None).places[places]

    def reconstruct(self, rows: Tensor) -> Tensor:
        # Tokens hold everything.
        return rows

    def sample(self, count: int) -> Tensor:
        here = self._columns.stop - self._columns.start
        numbers = len(self._layout.at)

        def change(part: str, rows: Tensor) -> Tensor:
            return self._sampled(rows.new_zeros(len(rows), numbers), part)

        nothing = torch.zeros(count, here, device=self.slot.device)
        return self._in_parts(change, nothing)

    def _in_parts(
        self, change: Callable[..., Tensor], *rows: Tensor, steps: int = 0
    ) -> Tensor:
        # Ranks take different rows, a part each.
        columns = self._columns
        rank, ranks = (self.slot.rank, self.slot.size) if columns.shared else (0, 1)
        numbers = len(self._layout.at) * (steps + 4)
        each = max(1, AT_ONCE // numbers)
        made = torch.empty_like(rows[0])
        for first in range(0, len(made), each * ranks):
            turn = slice(first, first + each * ranks)
            whole = [columns.whole(some[turn]) for some in rows]
            mine = slice(rank * each, (rank + 1) * each)
            changed = torch.zeros_like(whole[0])
            if len(changed[mine]):
                part = f" {first // each + rank}"
                changed[mine] = change(part, *(some[mine] for some in whole))
            made[turn] = columns.of(columns.summed(changed))
        return made

    @cuda.without_trials()
    def _epsilon(self, z: Tensor, t: Tensor) -> Tensor:
        layout = self._layout
        # Networks have learnt that there is no noise where there is no column.
        windows = (z * (layout.at >= 0)).reshape(-1, layout.width)
        each = layout.tokens // layout.window
        first = torch.arange(0, layout.tokens, layout.window, device=z.device)
        bf16 = self.options.server_precision == "bf16"
        with torch.autocast(z.device.type, torch.bfloat16, enabled=bf16):
            predicted = in_chunks(
                self.denoiser,
                windows,
                t.repeat_interleave(each),
                first.repeat(len(z)),
                widest=self.denoiser.widest,
            )
        return predicted.reshape(z.shape)

    # Files

    def save(self, path: Path, start: Tensor | None = None) -> None:
        assert self.row_scaling is not None
        if self.slot.rank:
            return
        groups = {
            "denoiser": self.denoiser.state_dict(),
            "standard": vars(self.row_scaling),
        }
        saved = SavedServer(groups, self.streams.learnings, start)
        storage.write(path, saved, self._columns.widths, self.options)

    def load(self, path: Path) -> None:
        widths, device = self._columns.widths, self.slot.device
        with storage.refusing(path):
            saved = storage.read(path, widths, self.options, device, GROUPS)
            scaling = RowScaling(**saved.groups["standard"])
            storage.check_scaling(scaling, self._columns.num_all)
            denoiser = rebuilt_with(saved.groups["denoiser"], self._new_denoiser)
        self.denoiser = denoiser.to(device)
        self.row_scaling = scaling
        self.streams.learnings = saved.learnings
        self.start = saved.start


def _scaling_of(bank: BankedRows) -> RowScaling:
    """Return the scaling of all columns; the bank is read block by block."""
    columns = bank.columns
    deviations = bank.deviations().clamp_min(SMALLEST)
    equal = deviations.new_full((1, len(bank)), 1 / len(bank))
    mean = columns.whole(bank.combined(equal))[0]
    widths = torch.tensor(columns.widths, device=mean.device)
    return RowScaling(mean, deviations.to(mean.dtype).repeat_interleave(widths))
