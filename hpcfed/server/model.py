"""The latent diffusion model over rows: it learns from a bank of uploads, and generates
rows.
"""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.errors import UserError, one_line
from hpcfed.kernels import cuda
from hpcfed.record.observer import observer
from hpcfed.record.safe import Reader, reading
from hpcfed.record.writing import check_limit, writing
from hpcfed.runtime import randomness
from hpcfed.runtime.device import peak_memory
from hpcfed.server import diffusion
from hpcfed.server.diffusion import Schedule, chunks
from hpcfed.server.networks import Autoencoder, Denoiser, counted_once, num_parameters
from hpcfed.server.options import NETWORKS, ServerOptions, batching
from hpcfed.server.scaling import LatentStandard, Standard
from hpcfed.server.training import Loss, Place, trainer

AT_ONCE = 2**28
"""Numbers of one activation, when rows pass through the networks and nothing is learnt:
a gigabyte.
"""
LARGE = 10_000_000
"""Parameters whose memory is worth the fifth of a second that looking for what nobody
holds takes.
"""
PEAKS = {
    "B200": (1100.0, 2250.0),
    "H200": (494.7, 989.4),
    "H100": (494.7, 989.4),
    "A100": (156.0, 311.9),
    "L40": (90.5, 181.1),
}
"""TFLOP/s of dense matrix products by the makers' word: TF32 and bfloat16."""

Told = Callable[[str, int, int], None]
"""Told of progress: the network, its steps done and their number."""


class Diverged(ArithmeticError):
    """What the server has learnt, or made, is not finite; every server rank finds the
    same.
    """


@dataclass
class Learnt:
    """What learning took, and how it went."""

    rows: int
    """In the bank."""
    losses: dict[str, np.ndarray] = field(default_factory=dict)
    """Of every step, by network."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    samples: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    """Of all steps, forward and backward, over all server ranks."""
    peak_flops: float = float("nan")
    """Of one server rank's device, per second."""
    peak_memory: list[float] = field(default_factory=list)
    """Bytes, of every server rank."""
    own_peak: int = 0
    """Bytes, of this rank."""
    ranks: int = 1
    kept: float = float("nan")
    """The share of clients whose generated row is nearest to their own uploads'
    latents; known after generation.
    """

    def note_peak(self, device: torch.device) -> None:
        """Keeps the most memory that was ever seen: DeepSpeed sets the device's own
        count back when ZeRO starts.
        """
        self.own_peak = max(self.own_peak, peak_memory(device))

    def utilisation(self, network: str) -> float:
        """Model FLOPs by those that the devices could have done meanwhile."""
        return self.flops[network] / (
            self.seconds[network] * self.ranks * self.peak_flops
        )


def steps_of(options: ServerOptions) -> dict[str, int]:
    """Steps of both networks."""
    return {name: -(-options.samples(name) // options.batch(name)) for name in NETWORKS}


def _tellers(name: str, steps: int, told: Told) -> Callable[[int], None]:
    """Tells of every step those who want to know."""
    watch = observer()

    def both(done: int) -> None:
        told(name, done, steps)
        watch.step(name, done, steps)

    return both


class LatentDiffusion:
    """Calls are collective over the server's ranks, and every rank has the same rows."""

    def __init__(
        self, widths: Sequence[int], options: ServerOptions, place: Place, *, seed: int
    ) -> None:
        """`widths` are the columns of the generated tensors, in order."""
        self.options, self.place = options, place
        self._widths, self._seed = list(widths), seed
        self._batching = {
            name: batching(options, place.size, name) for name in NETWORKS
        }
        self._runs = 0
        self.schedule = Schedule.linear(options.diffusion_steps, place.device)
        self.standard: Standard | None = None
        self.latents: LatentStandard | None = None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._number("initial weights"))
            self.autoencoder = Autoencoder(
                sum(widths),
                options.size,
                input_noise=options.input_noise,
                latent_noise=options.latent_noise,
            )
            self.denoiser = Denoiser(options.size)
        self._steps = steps_of(options)
        if options.server_load:
            self.load(Path(options.server_load))

    @property
    def learnt(self) -> bool:
        return self.latents is not None

    @cuda.without_trials()  # which found none that were quicker
    def learn(
        self, rows: Tensor, told: Told = lambda network, done, steps: None
    ) -> Learnt:
        """Learns the distribution of the rows; what was learnt before is where it
        starts.
        """
        started = self._clock()
        report = Learnt(
            len(rows),
            ranks=self.place.size,
            peak_flops=_peak_flops(self.place.device, self.options),
        )
        self.standard = Standard.of(rows, self._widths)
        x = self.standard(rows)
        self._fit(
            "autoencoder",
            self.autoencoder,
            self._reconstruction(x),
            self.autoencoder.flops(),
            report,
            told,
        )
        begin = self._clock()
        with observer().span("encode"):
            z = self._encoded(x)
            self.latents = LatentStandard.of(z)
        report.seconds["encode"] = self._clock() - begin
        flops = self.denoiser.flops(self.options.size.latent)
        self._fit(
            "denoiser",
            self.denoiser,
            self._denoising(self.latents(z)),
            flops,
            report,
            told,
        )
        self._runs += 1
        report.seconds["prepare"] = (
            self._clock() - started - sum(report.seconds.values())
        )
        return report

    def _fit(
        self,
        name: str,
        network: nn.Module,
        loss: Loss,
        flops: int,
        report: Learnt,
        told: Told,
    ) -> None:
        steps = self._steps[name]
        if self.options.server_checkpointing:
            network.checkpoint = _checkpoint(self.options)  # type: ignore[assignment]
        report.parameters[name] = num_parameters(network)
        report.note_peak(self.place.device)
        learning = trainer(
            network, self.options, self._batching[name], self.place, steps=steps
        )
        begin = self._clock()
        with observer().span(name):
            report.losses[name] = learning.fit(loss, steps, _tellers(name, steps, told))
        self._check_losses(name, report.losses[name])
        report.seconds[name] = self._clock() - begin
        report.note_peak(self.place.device)
        report.samples[name] = steps * self._batching[name].batch
        report.flops[name] = 3.0 * flops * report.samples[name]
        # ZeRO gathers whole tensors beside what it holds itself: they wait on the host
        # until that is gone.
        tensors = (
            dict(learning.tensors())
            if not self.options.zero_stage
            else _on_host(learning.tensors())
        )
        rebuilt = self._rebuilt(name, tensors)
        learning.close()
        del learning, network
        if (
            report.parameters[name] >= LARGE
            or self.options.zero_stage
            or self.place.device.type == "cuda"
        ):
            gc.collect()  # DeepSpeed's objects hold each other, and with them moments and captured passes
        rebuilt.to(self.place.device)

    def _check_losses(self, name: str, losses: np.ndarray) -> None:
        bad = np.flatnonzero(~np.isfinite(losses))
        if len(bad):
            raise Diverged(
                f"the server's {name} has diverged: its loss is not finite from step "
                f"{bad[0] + 1} of {len(losses)} on; "
                f"{self._advice()}"
            )

    def check_rows(self, verb: str, rows: Tensor, sound: Tensor | None = None) -> None:
        """Raise where generated rows are not finite; `sound` says for which rows they
        should be, else for all.
        """
        bad = ~rows.isfinite().all(1)
        if sound is not None:
            bad &= sound
        number = int(bad.sum())
        if number:
            raise Diverged(
                f"{number} of {len(rows)} rows that the server made ({verb}) are not "
                f"finite; {self._advice()}"
            )

    def _advice(self) -> str:
        """Name the options that keep networks from diverging."""
        precision = (
            " or --server-precision fp32"
            if self.options.server_precision == "bf16"
            else ""
        )
        return f"try --server-lr below {self.options.size.lr:g}{precision}"

    def _rebuilt(self, name: str, tensors: dict[str, Tensor]) -> nn.Module:
        """What DeepSpeed has wrapped is left behind; plain networks with the same
        tensors generate.
        """
        size = self.options.size
        network: nn.Module
        with torch.device(
            "meta"
        ):  # initial weights would cost time and memory, and move the global random stream
            if name == "autoencoder":
                noises = {
                    "input_noise": self.options.input_noise,
                    "latent_noise": self.options.latent_noise,
                }
                self.autoencoder = network = Autoencoder(
                    sum(self._widths), size, **noises
                )
            else:
                self.denoiser = network = Denoiser(size)
        network.load_state_dict(tensors, assign=True)
        return network.eval()

    def _reconstruction(self, x: Tensor) -> Loss:
        divided, latent = self._batching["autoencoder"], self.options.size.latent
        draw = self._draws("autoencoder")
        count = divided.drawn

        def loss(network: Callable[..., Tensor], step: int, number: int) -> Tensor:
            together, own = divided.part(number)
            random = draw(step, together)
            which = torch.randint(len(x), (count,), device=x.device, generator=random)
            noise = [
                torch.randn(count, width, device=x.device, generator=random)
                for width in (x.shape[1], latent)
            ]
            return network(x[which[own]], (noise[0][own], noise[1][own]))

        return loss

    def _denoising(self, z: Tensor) -> Loss:
        divided, schedule = self._batching["denoiser"], self.schedule
        draw = self._draws("denoiser")
        count = divided.drawn

        def loss(network: Callable[..., Tensor], step: int, number: int) -> Tensor:
            together, own = divided.part(number)
            random = draw(step, together)
            which = torch.randint(len(z), (count,), device=z.device, generator=random)[
                own
            ]
            t = torch.randint(
                1, schedule.steps + 1, (count,), device=z.device, generator=random
            )[own]
            noise = torch.randn(count, z.shape[1], device=z.device, generator=random)[
                own
            ]
            return F.mse_loss(network(schedule.noised(z[which], t, noise), t), noise)

        return loss

    def reconstruct(self, rows: Tensor) -> Tensor:
        """Through the autoencoder and back."""
        assert self.standard is not None
        return self.standard.undo(self._decoded(self._encoded(self.standard(rows))))

    def encode(self, rows: Tensor) -> Tensor:
        """Standardised latents of rows."""
        assert self.standard is not None and self.latents is not None
        return self.latents(self._encoded(self.standard(rows)))

    def decode(self, latents: Tensor) -> Tensor:
        assert self.standard is not None and self.latents is not None
        return self.standard.undo(self._decoded(self.latents.undo(latents)))

    @torch.no_grad()
    def invert(self, rows: Tensor, *, depth: int | None = None) -> Tensor:
        """New rows that keep each row's identity."""
        z = self.encode(rows)
        noise = self._noise("inversion", z)
        chosen = self.options.inversion_depth if depth is None else depth
        use = self.options.inversion_noise
        return self.decode(
            diffusion.invert(
                self.schedule, self._epsilon, z, depth=chosen, noise=noise, use=use
            )
        )

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """Rows out of noise alone."""
        like = torch.empty(count, self.options.size.latent, device=self.place.device)
        return self.decode(
            diffusion.sample(
                self.schedule, self._epsilon, self._noise("sampling", like)
            )
        )

    @torch.no_grad()
    def guide(
        self, before: Tensor, after: Tensor, *, strength: float, start: int, steps: int
    ) -> Tensor:
        """Rows after local training, led on by what all clients have taught the model."""
        old, new = self.encode(before), self.encode(after)
        return self.decode(
            diffusion.guide(
                self.schedule,
                self._epsilon,
                new,
                new - old,
                strength=strength,
                start=start,
                steps=steps,
            )
        )

    @cuda.without_trials()
    def _epsilon(self, z: Tensor, t: Tensor) -> Tensor:
        return torch.cat(
            [self.denoiser(z[part], t[part]) for part in _parts(z, self.denoiser)]
        )

    @torch.no_grad()
    @cuda.without_trials()
    def _encoded(self, x: Tensor) -> Tensor:
        return torch.cat(
            [self.autoencoder.encode(x[part]) for part in _parts(x, self.autoencoder)]
        )

    @torch.no_grad()
    @cuda.without_trials()
    def _decoded(self, z: Tensor) -> Tensor:
        return torch.cat(
            [self.autoencoder.decode(z[part]) for part in _parts(z, self.autoencoder)]
        )

    def _number(self, purpose: str) -> int:
        return int(
            randomness.generator(self._seed, f"server {purpose}", self._runs).integers(
                2**62
            )
        )

    def _draws(self, purpose: str) -> Callable[[int, int], torch.Generator]:
        """A generator that stands where (step, number of the draw) says."""
        base, random = self._number(purpose), torch.Generator(self.place.device)
        return lambda step, number: random.manual_seed(
            (base + (step << 16) + number) % 2**63
        )

    def _noise(self, purpose: str, like: Tensor) -> diffusion.Noise:
        random = torch.Generator(like.device).manual_seed(self._number(purpose))
        return lambda: torch.randn(
            like.shape, device=like.device, dtype=like.dtype, generator=random
        )

    def _clock(self) -> float:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
        return time.perf_counter()

    def save(self, path: Path) -> None:
        """The trained server, in a file that nobody needs to trust: numbers and JSON
        alone.
        """
        assert self.standard is not None and self.latents is not None
        numbers = sum(
            tensor.numel()
            for name in NETWORKS
            for tensor in getattr(self, name).state_dict().values()
        )
        check_limit(path, 4 * numbers)
        temporary = path.with_name(
            f".{path.name}.{os.getpid()}.tmp"
        )  # no link is followed
        temporary.unlink(missing_ok=True)
        try:
            with writing(path), h5py.File(temporary, "w") as file:
                file.attrs.update(
                    format=_FORMAT, schema=_SCHEMA, widths=self._widths, runs=self._runs
                )
                file["options"] = json.dumps(
                    self.options.model_dump(mode="json"), indent=1
                )
                for name in NETWORKS:
                    for key, tensor in getattr(self, name).state_dict().items():
                        _put(file, f"{name}/{key}", tensor.float())
                for standard in (self.standard, self.latents):
                    name = "standard" if standard is self.standard else "latents"
                    _put(file, f"{name}/mean", standard.mean)
                    _put(file, f"{name}/scale", standard.scale)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def load(self, path: Path) -> None:
        try:
            with reading(path, most=MOST_SERVER) as file:
                self._load(file, path)
        except UserError:
            raise
        except Exception as error:  # a damaged or hostile file makes libhdf5, h5py and torch raise anything
            raise UserError(
                f"--server-load {path} is not a saved server: {one_line(error)}"
            ) from None

    def _load(self, file: Reader, path: Path) -> None:
        facts = file.facts()
        if (facts.get("format"), facts.get("schema")) != (_FORMAT, _SCHEMA):
            raise UserError(
                f"--server-load {path} is not a server that this version has saved"
            )
        if list(facts["widths"]) != self._widths:
            raise UserError(
                f"--server-load {path} was made for other columns than this run generates"
            )
        written = json.loads(file.text("options"))
        saved = ServerOptions(**{name: written[name] for name in _SHAPING})
        if _shape(saved) != _shape(self.options):
            flags = " ".join(f"{flag} {value}" for flag, value in _shape(saved).items())
            raise UserError(f"--server-load {path} has another size; use {flags}")

        def tensors(group: str) -> dict[str, Tensor]:
            own = file.within(group)
            with np.errstate(over="ignore"):
                there = {
                    key: own.numbers(key, own.shape(key)).astype(np.float32)
                    for key in own.names()
                }
            for key, value in there.items():
                if not np.isfinite(value).all():
                    raise ValueError(f"{group}/{key} holds what no training makes")
            return {
                key: torch.as_tensor(value, device=self.place.device)
                for key, value in there.items()
            }

        for name in NETWORKS:
            self._rebuilt(name, tensors(name)).to(self.place.device)
        self.standard, self.latents = (
            Standard(**tensors("standard")),
            LatentStandard(**tensors("latents")),
        )
        for standard, width in (
            (self.standard, sum(self._widths)),
            (self.latents, self.options.size.latent),
        ):
            if standard.mean.shape != (width,) or standard.scale.shape not in (
                (),
                (1,),
                (width,),
            ):
                raise ValueError("its means and scales are of other columns")
        self._runs = int(facts["runs"])


_FORMAT, _SCHEMA = "hpcfed server", 2
MOST_SERVER = 2**40
"""Bytes of a saved server that is read."""
_SHAPING = (
    "server",
    "server_width",
    "server_latent",
    "server_depth",
    "diffusion_steps",
)
"""Options without which saved networks mean something else."""


def _on_host(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors}


def _parts(rows: Tensor, network: Autoencoder | Denoiser) -> Iterator[slice]:
    return chunks(len(rows), max(1, AT_ONCE // network.widest))


def _put(file: h5py.File, name: str, tensor: Tensor) -> None:
    """With checksums, where HDF5 can have them."""
    packed = (
        {"chunks": True, "fletcher32": True} if tensor.numel() and tensor.ndim else {}
    )
    file.create_dataset(name, data=tensor.cpu().numpy(), **packed)


def _shape(options: ServerOptions) -> dict[str, int]:
    size = options.size
    flags = {
        "--server-width": size.width,
        "--server-latent": size.latent,
        "--server-depth": size.depth,
    }
    return flags | {"--diffusion-steps": options.diffusion_steps}


def _checkpoint(options: ServerOptions) -> Callable[..., Tensor]:
    if options.server_engine == "deepspeed":
        return _deepspeed_checkpoint
    from torch.utils.checkpoint import checkpoint

    return lambda module, *inputs: checkpoint(
        counted_once(module), *inputs, use_reentrant=False
    )


def _deepspeed_checkpoint(module: nn.Module, *inputs: Tensor) -> Tensor:
    import deepspeed  # which was started by then

    if torch.is_grad_enabled() and not any(x.requires_grad for x in inputs):
        # It calls backward only for inputs that want a gradient; rows want none, but
        # the module's weights do.
        inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
    output: Tensor = deepspeed.checkpointing.checkpoint(counted_once(module), *inputs)
    return output


def _peak_flops(device: torch.device, options: ServerOptions) -> float:
    """NaN where it is not known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (tf32, bf16) in PEAKS.items():
            if known in name:
                return 1e12 * (bf16 if options.server_precision == "bf16" else tf32)
    return float("nan")
