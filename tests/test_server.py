"""The server's model in one process: diffusion, standardised residuals, networks,
options, and what it learns.
"""

import gc
import io
import itertools
import json
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hpcfed.errors import UserError
from hpcfed.options import RunConfig
from hpcfed.server import capture, diffusion, layers, report, trainer
from hpcfed.server import learning as server_learning
from hpcfed.server import networks as server_networks
from hpcfed.server.bank import BankedRows
from hpcfed.server.deepspeed_trainer import configuration
from hpcfed.server.diffusion import Schedule
from hpcfed.server.engines import make_trainer, recomputing
from hpcfed.server.guidance import Guidance
from hpcfed.server.latent_diffusion import LatentDiffusion
from hpcfed.server.losses import check_losses
from hpcfed.server.networks import (
    Autoencoder,
    Denoiser,
    denoiser_channels,
    encoder_channels,
    num_parameters,
    time_features,
)
from hpcfed.server.options import NETWORKS, ServerOptions, batching
from hpcfed.server.report import LearningReport
from hpcfed.server.scaling import LatentScaling, RowScaling
from hpcfed.server.schedule import check_columns, num_steps
from hpcfed.server.sizes import SIZES, Size
from hpcfed.server.trainer import PlainTrainer
from hpcfed.server.training_plan import RankSlot, TrainingPlan

T = 1000
SCHEDULE = Schedule.linear(T)
USES = ("recorded", "fresh", "none")
HERE = RankSlot(torch.device("cpu"))


def randoms(seed: int, *shape: int) -> Callable[[], Tensor]:
    """Fresh float64 noise with every call."""
    random = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(shape, dtype=torch.float64, generator=random)


def nothing(z: Tensor, t: Tensor) -> Tensor:
    return torch.zeros_like(z)


def of_gaussian(mean: float | Tensor, variance: float) -> diffusion.Epsilon:
    """The exact ε when z_0 is normal: what is expected of the noise, given z_t.
    Variance 0 is a point.
    """

    def epsilon(z: Tensor, t: Tensor) -> Tensor:
        kept = SCHEDULE.alpha_bars[t].unsqueeze(-1)
        return (
            (1 - kept).sqrt() * (z - kept.sqrt() * mean) / (kept * variance + 1 - kept)
        )

    return epsilon


# Diffusion


def test_betas_are_linear_and_their_products_what_is_kept() -> None:
    betas = SCHEDULE.betas
    assert SCHEDULE.steps == T and betas[0] == 0 and SCHEDULE.alpha_bars[0] == 1
    np.testing.assert_allclose(
        betas[1:], [1e-4 + (0.02 - 1e-4) * i / (T - 1) for i in range(T)], rtol=1e-12
    )
    kept = list(
        itertools.accumulate(
            betas.tolist(), lambda bar, beta: bar * (1 - beta), initial=1.0
        )
    )[1:]
    np.testing.assert_allclose(SCHEDULE.alpha_bars, kept, rtol=1e-12)


@pytest.mark.parametrize("steps", [2, 20, 100, 500, 2000])
def test_other_numbers_of_steps_end_in_noise_as_well(steps: int) -> None:
    schedule = Schedule.linear(steps)
    assert schedule.steps == steps
    assert (schedule.betas[1:] > 0).all() and (schedule.betas < 1).all()
    assert schedule.alpha_bars[-1] < 1e-3
    if steps >= 100:
        assert schedule.betas.sum().item() == pytest.approx(SCHEDULE.betas.sum().item())


def test_diffuse_and_retrace_return_the_latents() -> None:
    noise = randoms(0, 6, 16)
    z0 = 3 * noise()
    end, noises = diffusion.diffuse(SCHEDULE, z0, T, noise)
    assert len(noises) == T
    assert (end - z0).abs().mean() > 0.5
    assert (diffusion.retrace(SCHEDULE, end, noises) - z0).abs().max() < 1e-10


def test_recorded_noises_are_the_ones_that_were_added() -> None:
    kept: list[Tensor] = []
    noise = randoms(1, 4, 8)

    def remembered() -> Tensor:
        kept.append(noise())
        return kept[-1]

    _, noises = diffusion.diffuse(SCHEDULE, noise(), 50, remembered)
    torch.testing.assert_close(
        torch.stack(noises), torch.stack(kept), rtol=0, atol=1e-11
    )


def test_noised_is_many_steps_at_once() -> None:
    """Steps are linear, so their mean and their variance can be read off a latent of
    one and noises of one each.
    """
    depth = 300
    silent = diffusion.diffuse(
        SCHEDULE,
        torch.ones(1, 1, dtype=torch.float64),
        depth,
        lambda: torch.zeros(1, 1),
    )[0]
    impulses = iter(
        torch.eye(depth, dtype=torch.float64)
    )  # row s is disturbed in step s alone
    spread, _ = diffusion.diffuse(
        SCHEDULE,
        torch.zeros(depth, 1, dtype=torch.float64),
        depth,
        lambda: next(impulses)[:, None],
    )
    one = torch.ones(1, 1, dtype=torch.float64)
    at = torch.tensor([depth])
    assert SCHEDULE.noised(one, at, 0 * one).item() == pytest.approx(
        silent.item(), rel=1e-12
    )
    assert SCHEDULE.noised(0 * one, at, one).item() ** 2 == pytest.approx(
        spread.square().sum().item(), rel=1e-12
    )


def test_noised_is_distributed_as_step_by_step() -> None:
    count, depth = 20_000, 200
    noise = randoms(2, count, 1)
    z0 = torch.full((count, 1), 0.7, dtype=torch.float64)
    stepwise, _ = diffusion.diffuse(SCHEDULE, z0, depth, noise)
    at_once = SCHEDULE.noised(z0, torch.full((count,), depth), noise())
    kept = SCHEDULE.alpha_bars[depth].item()
    for drawn in (stepwise, at_once):
        assert drawn.mean().item() == pytest.approx(
            kept**0.5 * 0.7, abs=5 * ((1 - kept) / count) ** 0.5
        )
        assert drawn.var().item() == pytest.approx(1 - kept, rel=5 * (2 / count) ** 0.5)
    assert stats.ks_2samp(stepwise.flatten(), at_once.flatten()).pvalue > 0.01


def test_noised_has_a_time_for_every_latent() -> None:
    noise = randoms(3, 5, 4)
    z0, added = noise(), noise()
    times = torch.tensor([1, 10, 100, 500, 1000])
    together = SCHEDULE.noised(z0, times, added)
    for i, t in enumerate(times):
        torch.testing.assert_close(
            together[i],
            SCHEDULE.noised(z0[[i]], t[None], added[[i]])[0],
            rtol=0,
            atol=0,
        )
    assert SCHEDULE.noised(z0.float(), times, added.float()).dtype == torch.float32


@pytest.mark.parametrize("t", [2, 3, 50, 700, 1000])
def test_mean_and_sigma_are_those_of_the_step_before_given_both_ends(t: int) -> None:
    """By Bayes: z_{t−1} is normal around √ᾱ_{t−1} z_0, and z_t is √α_t z_{t−1} and
    noise of variance β_t.
    """
    noise = randoms(4, 7, 5)
    z0, epsilon = noise(), noise()
    z = SCHEDULE.noised(z0, torch.full((7,), t), epsilon)
    beta, before = SCHEDULE.betas[t].item(), SCHEDULE.alpha_bars[t - 1].item()
    variance = 1 / (1 / (1 - before) + (1 - beta) / beta)
    mean = variance * (before**0.5 * z0 / (1 - before) + (1 - beta) ** 0.5 * z / beta)
    torch.testing.assert_close(SCHEDULE.mean(z, t, epsilon), mean, rtol=1e-9, atol=1e-9)
    assert SCHEDULE.sigma(t).item() ** 2 == pytest.approx(variance, rel=1e-9)


def test_nothing_is_added_in_the_last_step() -> None:
    assert SCHEDULE.sigma(1) == 0
    assert Schedule.linear(10).sigma(1) == 0
    assert SCHEDULE.sigma(2) > 0


@pytest.mark.parametrize("t", [1, 2, 10, 100, 300, 1000])
def test_a_step_with_the_true_noise_goes_towards_the_latents_before(t: int) -> None:
    noise = randoms(5, 20_000, 8)
    z0 = 1.5 * noise() + 0.3
    before = SCHEDULE.noised(z0, torch.full((len(z0),), t - 1), noise())
    beta, kept = SCHEDULE.betas[t], SCHEDULE.alpha_bars[t]
    now = (1 - beta).sqrt() * before + beta.sqrt() * noise()
    mean = SCHEDULE.mean(now, t, (now - kept.sqrt() * z0) / (1 - kept).sqrt())
    nearer = (now - before).norm(dim=1) - (mean - before).norm(dim=1)
    assert nearer.mean() > 4 * nearer.std() / len(nearer) ** 0.5, "not by chance"


@pytest.mark.parametrize("use", USES)
def test_inversion_of_no_depth_is_the_identity(use: Any) -> None:
    noise = randoms(6, 3, 4)
    z0 = noise()
    assert torch.equal(
        diffusion.invert(SCHEDULE, nothing, z0, depth=0, noise=noise, use=use), z0
    )


@pytest.mark.parametrize("use", USES)
def test_inversion_of_one_step_with_the_true_noise_is_the_identity(use: Any) -> None:
    noise = randoms(7, 3, 4)
    z0 = noise()
    back = diffusion.invert(
        SCHEDULE, of_gaussian(z0, 0.0), z0, depth=1, noise=noise, use=use
    )
    torch.testing.assert_close(back, z0, rtol=0, atol=1e-12)


def test_inversion_takes_its_own_noise_off_again() -> None:
    """Eqs. 11 to 16 in numpy, one number at a time."""
    depth, size = 40, 6
    noise = randoms(8, 1, size)
    z0 = noise()
    drawn = [noise().numpy()[0] for _ in range(depth)]
    betas = np.linspace(1e-4, 0.02, T)
    bars = np.concatenate([[1.0], np.cumprod(1 - betas)])
    factor = 0.3  # of a denoiser that is wrong, so that nothing cancels
    z = z0.numpy()[0].copy()
    for t in range(1, depth + 1):
        z = np.sqrt(1 - betas[t - 1]) * z + np.sqrt(betas[t - 1]) * drawn[t - 1]
    for t in range(depth, 0, -1):
        beta = betas[t - 1]
        mean = (z - beta / np.sqrt(1 - bars[t]) * factor * z * t / T) / np.sqrt(
            1 - beta
        )
        z = mean - np.sqrt((1 - bars[t - 1]) / (1 - bars[t]) * beta) * drawn[t - 1]
    again = iter(drawn)
    found = diffusion.invert(
        SCHEDULE,
        lambda z, t: factor * z * t[:, None] / T,
        z0,
        depth=depth,
        noise=lambda: torch.from_numpy(next(again))[None],
    )
    np.testing.assert_allclose(found.numpy()[0], z, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("use", "times"), [("recorded", 1), ("none", 1), ("fresh", 2)])
def test_only_fresh_noise_is_drawn_anew_on_the_way_back(use: Any, times: int) -> None:
    drawn = 0

    def noise() -> Tensor:
        nonlocal drawn
        drawn += 1
        return torch.ones(2, 3)

    diffusion.invert(SCHEDULE, nothing, torch.ones(2, 3), depth=7, noise=noise, use=use)
    assert drawn == 7 * times


@pytest.mark.parametrize("depth", [1, 100, T])
def test_ddim_returns_the_datum_whose_noise_it_is_told(depth: int) -> None:
    noise = randoms(9, 5, 4)
    z0 = noise()
    back = diffusion.invert(
        SCHEDULE, of_gaussian(z0, 0.0), z0, depth=depth, noise=noise, use="none"
    )
    torch.testing.assert_close(back, z0, rtol=0, atol=1e-10)


@pytest.mark.parametrize("use", ["fresh", "none"])
def test_inversion_keeps_the_distribution_that_the_denoiser_knows(use: Any) -> None:
    noise = randoms(10, 4_000, 1)
    z0 = 2.0 + 0.5 * noise()
    for depth in (100, T):
        made = diffusion.invert(
            SCHEDULE, of_gaussian(2.0, 0.25), z0, depth=depth, noise=noise, use=use
        )
        assert made.mean().item() == pytest.approx(2.0, abs=0.03)
        assert made.std().item() == pytest.approx(0.5, rel=0.05)


def test_samples_of_a_point_land_on_it() -> None:
    noise, point = randoms(11, 8, 4), randoms(12, 4)()
    made = diffusion.sample(SCHEDULE, of_gaussian(point, 0.0), noise)
    torch.testing.assert_close(made, point.expand(8, 4), rtol=0, atol=1e-9)


def test_samples_have_the_distribution_that_the_denoiser_knows() -> None:
    made = diffusion.sample(SCHEDULE, of_gaussian(-1.0, 4.0), randoms(13, 4_000, 1))
    assert made.mean().item() == pytest.approx(-1.0, abs=0.13)
    assert made.std().item() == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("start", [1, 20, 500])
def test_a_guided_step_moves_along_the_local_update(start: int) -> None:
    noise = randoms(14, 6, 16)
    z, progress = noise(), noise()
    free = SCHEDULE.mean(z, start, torch.zeros_like(z))
    moved = []
    for strength in (-1.0, 0.0, 1.0):
        how = Guidance(strength=strength, start=start, steps=1)
        guided = diffusion.guide(SCHEDULE, nothing, z, progress, how, noise)
        moved.append(guided - free)
    assert torch.equal(moved[0], torch.zeros_like(z)), "ω = −1 is no guidance"
    assert torch.cosine_similarity(moved[1], progress).min() > 0.99
    torch.testing.assert_close(moved[2], 2 * moved[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("sign", "noise", "expected"),
    [
        # (1 + 0.546875 · 1) / 0.75
        ("progress", None, 2.0625),
        # (1 − 0.546875 · 1) / 0.75
        ("printed", None, 0.453125 / 0.75),
        # and σ_2 = √(0.36 / 0.64 · 0.4375) = 0.75 √0.4375 times a noise of 2
        ("progress", 2.0, 2.0625 + 1.5 * 0.4375**0.5),
    ],
)
def test_a_guided_step_by_hand(sign: Any, noise: float | None, expected: float) -> None:
    """With β_1 = 0.36 and β_2 = 0.4375: ᾱ_1 = 0.64, ᾱ_2 = 0.64 · 0.5625 = 0.36, so β_2 /
    √(1 − ᾱ_2) = 0.4375 / 0.8 = 0.546875 and √(1 − β_2) = 0.75. ω = 1 doubles a
    progress of 0.5; ε is 0 and z is 1.
    """
    betas = torch.tensor([0.0, 0.36, 0.4375], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    how = Guidance(
        strength=1.0, start=2, steps=1, sign=sign, fresh_noise=noise is not None
    )
    schedule = Schedule(betas, (1 - betas).cumprod(0))
    found = diffusion.guide(
        schedule, nothing, one, 0.5 * one, how, lambda: (noise or 0.0) * one
    )
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_guidance_ends_at_the_latents() -> None:
    noise = randoms(15, 3, 4)
    z, progress = noise(), noise()
    seen: list[int] = []

    def epsilon(z: Tensor, t: Tensor) -> Tensor:
        seen.append(int(t[0]))
        return torch.zeros_like(z)

    for start, steps in ((3, 20), (30, 2), (30, 0)):
        how = Guidance(strength=0.0, start=start, steps=steps)
        found = diffusion.guide(SCHEDULE, epsilon, z, progress, how, noise)
    assert seen == [3, 2, 1, 30, 29]
    assert torch.equal(found, z), "no steps"


@pytest.mark.parametrize(
    ("entry", "steps", "expected"),
    [
        ("clean", 2, 0.6),
        # z_2 = 0.6; two steps make 0.6 · 0.75 · 0.8
        ("scaled", 2, 0.36),
        # z_2 = 0.6 + 0.8 · 0.5 = 1
        ("noised", 2, 0.6),
        # One step ends at z_1 = 0.6 · 0.75, whose scale is √ᾱ_1 = 0.8.
        ("scaled", 1, 0.45 / 0.8),
        ("clean", 1, 0.75),
    ],
)
def test_how_a_latent_enters_guidance_by_hand(
    entry: Any, steps: int, expected: float
) -> None:
    """With β_1 = 0.36 and β_2 = 0.4375: √ᾱ_2 = 0.6 and √(1 − ᾱ_2) = 0.8. The ideal
    denoiser of latents of variance 1 is ε(z, t) = √(1 − ᾱ_t) z. So a step multiplies by
    (1 − β_t) / √(1 − β_t): by 0.75, then by 0.8. The latent is 1, the noise 0.5.
    """
    betas = torch.tensor([0.0, 0.36, 0.4375], dtype=torch.float64)
    schedule = Schedule(betas, (1 - betas).cumprod(0))
    one = torch.ones(1, 1, dtype=torch.float64)

    def ideal(z: Tensor, t: Tensor) -> Tensor:
        return (1 - schedule.alpha_bars[t]).sqrt().unsqueeze(-1) * z

    # ω = −1: progress does not count.
    how = Guidance(strength=-1.0, start=2, steps=steps, entry=entry)
    found = diffusion.guide(schedule, ideal, one, 9 * one, how, lambda: 0.5 * one)
    assert found.item() == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 3000), st.integers(1, 600))
@settings(deadline=None)
def test_chunks_cover_everything_once(count: int, most: int) -> None:
    parts = list(server_networks.chunks(count, most))
    covered = [i for part in parts for i in range(count)[part]]
    assert covered == list(range(count))
    lengths = [len(range(count)[part]) for part in parts]
    assert all(0 < length <= most for length in lengths)
    assert (
        len(parts) == -(-count // most)
        and max(lengths, default=0) - min(lengths, default=0) <= 1
    )


# Standardised residuals


def uneven_rows() -> tuple[Tensor, list[int]]:
    """30 rows of three tensors on scales of 1, 100 and 0.01."""
    widths = [7, 3, 5]
    scales = torch.repeat_interleave(
        torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64), torch.tensor(widths)
    )
    return 5 + scales * randoms(16, 30, 15)(), widths


def test_standardised_residuals_have_no_mean_and_a_scale_of_one_in_every_tensor() -> (
    None
):
    rows, widths = uneven_rows()
    x = RowScaling.of(rows, widths)(rows)
    assert x.mean(0).abs().max() < 1e-10
    for part in x.split(widths, 1):
        assert part.square().mean().sqrt().item() == pytest.approx(1)
    columns = x[:, :7].std(0)
    assert columns.max() / columns.min() > 1.05, (
        "a scale for the tensor, not for every column"
    )


def test_undo_inverts_standardising() -> None:
    rows, widths = uneven_rows()
    standard = RowScaling.of(rows, widths)
    torch.testing.assert_close(standard.undo(standard(rows)), rows)
    other = randoms(17, 4, 15)()
    torch.testing.assert_close(standard(standard.undo(other)), other)


def test_what_rows_have_in_common_does_not_hide_what_they_differ_in() -> None:
    """The trap: a common part a hundred times as large. Divided by their own deviation,
    rows would be all alike.
    """
    noise = randoms(18, 1, 200)
    common = 3 * noise()
    rows = common + 0.03 * randoms(19, 40, 200)()
    x = RowScaling.of(rows, [200])(rows)
    assert x.square().mean().sqrt().item() == pytest.approx(1)
    assert torch.cosine_similarity(x, common).abs().max() < 0.35
    distances = torch.cdist(x, x)[~torch.eye(40, dtype=torch.bool)] / 200**0.5
    assert distances.mean().item() == pytest.approx(2**0.5, rel=0.05), (
        "rows are as far apart as strangers are"
    )


@pytest.mark.parametrize("value", [0.0, 0.1, -3e4])
def test_a_tensor_that_never_differs_survives(value: float) -> None:
    rows, widths = uneven_rows()
    rows = rows.float()
    rows[:, 7:10] = value
    standard = RowScaling.of(rows, widths)
    x = standard(rows)
    assert x.isfinite().all() and x.abs().max() < 10
    torch.testing.assert_close(standard.undo(x), rows)
    generated = standard.undo(
        torch.randn(50, 15, generator=torch.Generator().manual_seed(0))
    )
    torch.testing.assert_close(generated[:, 7:10], rows[:1, 7:10].expand(50, 3))


def test_latents_are_centred_and_share_one_scale() -> None:
    latents = (
        3 + torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64) * randoms(20, 50, 3)()
    )
    standard = LatentScaling.of(latents)
    z = standard(latents)
    assert z.mean(0).abs().max() < 1e-12
    assert z.square().mean().sqrt().item() == pytest.approx(1)
    assert (z.std(0)[1] / z.std(0)[2]).item() == pytest.approx(
        (latents.std(0)[1] / latents.std(0)[2]).item()
    )
    torch.testing.assert_close(standard.undo(z), latents)
    alike = torch.full((4, 3), 2.5)
    same = LatentScaling.of(alike)
    assert torch.equal(same.undo(same(alike)), alike)


# Networks

TINY = Size(4, 8, 3)


def test_channels_are_the_papers() -> None:
    assert encoder_channels(Size(64, 256, 5)) == [64, 128, 256, 256, 32]
    assert denoiser_channels(Size(64, 256, 5)) == [64, 128, 256, 512, 256, 128, 64]


def on_meta(size: Size, columns: int) -> tuple[Autoencoder, Denoiser]:
    """Networks without memory for their weights."""
    with torch.device("meta"):
        return Autoencoder(columns, size).eval(), Denoiser(size).eval()


@pytest.mark.parametrize(
    ("name", "columns", "least", "most"),
    [
        ("paper", 75_146, 38e6, 43e6),
        ("large", 75_146, 1e9, 2e9),
        ("small", 10_000, 1e5, 1e6),
    ],
)
def test_sizes_are_as_said(name: str, columns: int, least: float, most: float) -> None:
    autoencoder, denoiser = on_meta(SIZES[name], columns)
    assert least < num_parameters(autoencoder) < most
    assert least < num_parameters(autoencoder) + num_parameters(denoiser) < 1.1 * most


def test_the_parameters_of_the_paper_size_are_counted_by_hand() -> None:
    """Padded to a multiple of 32, 75,146 columns are 75,168, and 2,349 of them are left
    at the end.
    """
    channels = [1, 64, 128, 256, 256, 32]
    convolutions = sum(7 * a * b for a, b in itertools.pairwise(channels))
    norms = 2 * (sum(channels[1:]) + sum(channels[1:-1]))
    linear = 2 * 32 * 2349 * 256 + 256 + 32 * 2349
    autoencoder, _ = on_meta(SIZES["paper"], 75_146)
    assert num_parameters(autoencoder) == 2 * convolutions + norms + linear + 1, (
        "the last convolution has a bias"
    )


@pytest.mark.parametrize("columns", [1, 7, 64, 65, 101])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_any_number_of_columns_passes(columns: int, depth: int) -> None:
    size = Size(4, 6, depth)
    network, denoiser = Autoencoder(columns, size), Denoiser(size)
    rows = torch.randn(3, columns)
    latents = network.encode(rows)
    assert latents.shape == (3, 6)
    assert network.decode(latents).shape == (3, columns)
    assert network(rows).shape == ()
    assert denoiser(latents, torch.tensor([1, 2, 3])).shape == (3, 6)


@pytest.mark.parametrize("columns", [96, 101])
def test_the_decoder_mirrors_the_encoder(columns: int) -> None:
    network = Autoencoder(columns, Size(4, 6, 4))
    ways: dict[str, list[tuple[int, ...]]] = {"encoder": [], "decoder": []}
    for name, way in ways.items():
        for stage in getattr(network, name):
            stage.register_forward_hook(
                lambda module, inputs, output, way=way: way.append(
                    (*inputs[0].shape[1::2], *output.shape[1::2])
                )
            )
    network(torch.randn(2, columns))
    assert [
        (after, longer, before, shorter)
        for before, shorter, after, longer in ways["decoder"]
    ] == [
        (before, longer, after, shorter)
        for before, longer, after, shorter in ways["encoder"]
    ][::-1]
    lengths = [way[1] for way in ways["encoder"]]
    assert (
        lengths == [network.padded // 2**i for i in range(4)]
        and 0 <= network.padded - columns < 16
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_one_channel_as_a_matrix_product(stride: int) -> None:
    """What a GPU computes at the two ends of the networks, against the convolutions
    that others compute.
    """
    torch.manual_seed(0)
    down = layers.Convolution(1, 6, 7, stride=stride, padding=3, bias=False).double()
    x = torch.randn(3, 1, 1, 40, dtype=torch.float64)
    torch.testing.assert_close(down.as_product(x), down(x))
    up = layers.Upsampling(5, 1, 7, stride=2, padding=3, output_padding=1)
    x = torch.randn(3, 5, 1, 21)
    torch.testing.assert_close(up.as_product(x), up(x))


@pytest.mark.parametrize("size", [SIZES["paper"], SIZES["small"], TINY])
def test_flops_are_those_that_torch_counts(size: Size) -> None:
    autoencoder, denoiser = on_meta(size, 9_999)
    with torch.device("meta"), FlopCounterMode(display=False) as both_ways:
        autoencoder(torch.randn(3, 9_999))
    with torch.device("meta"), FlopCounterMode(display=False) as denoising:
        denoiser(torch.randn(3, size.latent), torch.ones(3))
    assert both_ways.get_total_flops() == pytest.approx(
        3 * autoencoder.flops(), rel=0.02
    )
    assert denoising.get_total_flops() == pytest.approx(3 * denoiser.flops(), rel=0.02)


def test_noise_is_added_on_both_ways_in() -> None:
    torch.manual_seed(0)
    network = Autoencoder(40, TINY, input_noise=0.5, latent_noise=2.0).eval()
    rows, on_rows, on_latents = (
        torch.randn(3, 40),
        torch.randn(3, 40),
        torch.randn(3, 8),
    )
    made = network.decode(network.encode(rows + 0.5 * on_rows) + 2.0 * on_latents)
    torch.testing.assert_close(
        network(rows, (on_rows, on_latents)), (made - rows).square().mean()
    )
    silent = (torch.zeros(3, 40), torch.zeros(3, 8))
    torch.testing.assert_close(network(rows, silent), network(rows))
    assert network(rows, (on_rows, on_latents)) != network(rows)


def test_the_denoiser_sees_the_time_and_its_latents() -> None:
    torch.manual_seed(0)
    network = Denoiser(TINY)
    z = torch.randn(2, 8)
    early, late = (network(z, torch.tensor([t, t])) for t in (3, 700))
    assert not torch.allclose(early, late)
    mixed = network(z, torch.tensor([3, 700]))
    torch.testing.assert_close(
        mixed, torch.stack([early[0], late[1]]), rtol=1e-4, atol=1e-5
    )
    features = time_features(torch.arange(1, 1001))
    assert features.shape == (1000, 256)
    assert torch.cdist(features, features).fill_diagonal_(9).min() > 0.1, (
        "every time has features of its own"
    )


def test_the_denoisers_skips_are_added() -> None:
    """So the input reaches the output even where nothing comes through the middle."""
    torch.manual_seed(0)
    network = Denoiser(Size(4, 8, 5))
    middle = len(network.stages) // 2
    network.stages[middle].register_forward_hook(
        lambda module, inputs, output: 0 * output
    )
    z = torch.randn(2, 8)
    assert not torch.allclose(network(z, torch.ones(2)), network(-z, torch.ones(2)))


def learnt_once(network: torch.nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Output, gradients and statistics of one pass."""
    output = network(*inputs).square().mean()
    output.backward()
    gradients = [p.grad for p in network.parameters()]
    assert all(g is not None for g in gradients)
    return [
        output.detach(),
        *(g for g in gradients if g is not None),
        *network.buffers(),
    ]


def test_activations_computed_anew_change_nothing() -> None:
    """DeepSpeed's way of it needs a process group, and is tested with the ranks."""
    made = []
    for anew in (False, True):
        torch.manual_seed(3)
        autoencoder, denoiser = Autoencoder(101, TINY), Denoiser(TINY)
        if anew:
            autoencoder.checkpoint = denoiser.checkpoint = recomputing(
                ServerOptions(server_engine="torch")
            )
        passed = [learnt_once(denoiser, torch.randn(6, 8), torch.ones(6))]
        passed += [
            learnt_once(autoencoder, torch.randn(6, 101)) for _ in range(2)
        ]  # counting is not left switched off
        made.append([tensor.clone() for part in passed for tensor in part])
    for plain, anew in zip(*made, strict=True):
        torch.testing.assert_close(anew, plain)


# The latent diffusion model

CLIENTS, UPLOADS, WIDTHS = 12, 15, [300, 100]
SEVERAL: dict[str, Any] = {"server": "small", "server_engine": "torch"}
# One convolution each way learns fastest what has no local structure; deeper networks
# are in the quick model.
LEARNING = ServerOptions(
    **SEVERAL, server_width=8, server_latent=16, server_depth=1, server_lr=5e-3,
    server_batch=24, autoencoder_samples=3600, denoiser_samples=3600,
)  # fmt: skip
QUICK = ServerOptions(
    **SEVERAL, server_width=4, server_latent=8, server_depth=2, server_batch=8,
    autoencoder_samples=40, denoiser_samples=48, diffusion_steps=30, inversion_depth=10,
)  # fmt: skip


def uploads() -> Tensor:
    """Of every client some: a common row, an own part of 2 % in a few directions, and
    noise of 0.3 %.
    """
    random = torch.Generator().manual_seed(0)
    base = torch.randn(400, generator=random)
    own = (
        torch.randn(CLIENTS, 4, generator=random)
        @ torch.randn(4, 400, generator=random)
        / 2
    )
    noise = torch.randn(CLIENTS, UPLOADS, 400, generator=random)
    return base + 0.02 * own[:, None] + 0.003 * noise


ROWS = uploads()
BANK = ROWS.flatten(0, 1)
BANKED = BankedRows.of(BANK, WIDTHS)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more, and sums are then the same on every machine
    with the same chip.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(one_thread: None) -> LatentDiffusion:
    learning = LatentDiffusion(WIDTHS, LEARNING, HERE, seed=1)
    assert not learning.is_trained
    report = learning.learn(BANKED)
    assert learning.is_trained
    assert report.rows == len(BANK)
    return learning


@pytest.fixture(scope="module")
def quick(one_thread: None) -> LatentDiffusion:
    learning = LatentDiffusion(WIDTHS, QUICK, HERE, seed=1)
    learning.learn(BANKED)
    return learning


def kept_identity(model: LatentDiffusion, depth: int) -> float:
    """How many clients' last rows lie nearest to the client's own latent centre after
    inversion.
    """
    centres = model.encode(BANK).view(CLIENTS, UPLOADS, -1).mean(1)
    made = model.invert(ROWS[:, -1], depth=depth)
    nearest = torch.cdist(model.encode(made), centres).argmin(1)
    return (nearest == torch.arange(CLIENTS)).double().mean().item()


def error(made: Tensor, rows: Tensor) -> float:
    """Against that of the mean row, which is 1."""
    return ((made - rows).norm() / (rows - rows.mean(0)).norm()).item()


def test_reconstruction_beats_the_mean_by_far(model: LatentDiffusion) -> None:
    """Noise alone is 0.15 of what rows differ in; measured were 0.15 to 0.17 over
    seeds.
    """
    assert error(model.reconstruct(BANK), BANK) < 0.25


def test_encode_and_decode_are_the_two_halves_of_reconstruction(
    model: LatentDiffusion,
) -> None:
    latents = model.encode(BANK)
    assert latents.mean(0).abs().max() < 1e-4
    assert latents.square().mean().sqrt().item() == pytest.approx(1, rel=1e-4)
    torch.testing.assert_close(model.decode(latents), model.reconstruct(BANK))


def test_a_shallow_inversion_keeps_every_clients_identity(
    model: LatentDiffusion,
) -> None:
    assert kept_identity(model, 100) >= 0.75, "one of twelve would be chance"
    made = model.invert(ROWS[:, -1])
    assert error(made, ROWS[:, -1]) < 0.4, "a depth of 100 is the default"
    assert not torch.allclose(
        made, model.reconstruct(ROWS[:, -1]), rtol=0, atol=1e-3
    ), "something is generated"


def test_an_inversion_from_pure_noise_loses_it(model: LatentDiffusion) -> None:
    """One of twelve would be chance, and is what was measured."""
    assert kept_identity(model, LEARNING.diffusion_steps) <= 0.5


def test_inversion_of_no_depth_is_reconstruction(model: LatentDiffusion) -> None:
    torch.testing.assert_close(model.invert(BANK, depth=0), model.reconstruct(BANK))


def test_guidance_follows_what_a_client_has_learnt(model: LatentDiffusion) -> None:
    before, after = ROWS[:, 0], ROWS[:, 0] + 0.5 * (ROWS[:, 0] - BANK.mean(0))
    led, further = (
        model.guide(before, after, Guidance(strength=s, start=20, steps=5))
        for s in (0.0, 3.0)
    )
    old, new, less, more = (
        model.encode(rows) for rows in (before, after, led, further)
    )
    assert torch.cosine_similarity(more - less, new - old).mean() > 0.8


def test_a_moved_row_keeps_what_the_autoencoder_loses(quick: LatentDiffusion) -> None:
    before, after = ROWS[:, 0], ROWS[:, 1]
    decoded, moved = (
        quick.guide(
            before, after, Guidance(strength=0.5, start=10, steps=3, moved=moved)
        )
        for moved in (False, True)
    )
    lost = after - quick.reconstruct(after)
    assert lost.norm() > 1e-3
    torch.testing.assert_close(moved, decoded + lost)
    still = Guidance(strength=0.5, start=10, steps=0, moved=True)
    torch.testing.assert_close(quick.guide(before, after, still), after)


def test_learning_reports_what_it_did(quick: LatentDiffusion) -> None:
    seen: list[tuple[str, int, int]] = []
    learning = LatentDiffusion(WIDTHS, QUICK, HERE, seed=1)
    report = learning.learn(BANKED, lambda *told: seen.append(told[:3]))
    steps = {"autoencoder": 5, "denoiser": 6}
    assert num_steps(QUICK) == steps
    assert seen == [
        (name, i + 1, count) for name, count in steps.items() for i in range(count)
    ]
    for name, count in steps.items():
        network = getattr(learning, name)
        assert (
            report.losses[name].shape == (count,)
            and np.isfinite(report.losses[name]).all()
        )
        assert report.samples[name] == 8 * count
        assert report.parameters[name] == num_parameters(network)
        assert report.seconds[name] > 0
    assert report.flops["autoencoder"] == 3 * 40 * learning.autoencoder.flops()
    assert report.flops["denoiser"] == 3 * 48 * learning.denoiser.flops()


def test_an_unfinished_batch_is_filled() -> None:
    assert num_steps(QUICK.model_copy(update={"autoencoder_samples": 41})) == {
        "autoencoder": 6,
        "denoiser": 6,
    }


def made_by(model: LatentDiffusion) -> list[Tensor]:
    how = Guidance(strength=0.5, start=10, steps=3)
    led = model.guide(ROWS[:, 0], ROWS[:, 1], how)
    return [model.invert(ROWS[:, 0]), model.sample(5), led, model.reconstruct(BANK)]


def test_the_same_seed_learns_the_same_to_the_bit(quick: LatentDiffusion) -> None:
    again = LatentDiffusion(WIDTHS, QUICK, HERE, seed=1)
    torch.rand(7)  # the global stream is nobody's business
    again.learn(BANKED)
    assert all(map(torch.equal, made_by(again), made_by(quick)))


def test_other_seeds_learn_and_draw_something_else(quick: LatentDiffusion) -> None:
    other = LatentDiffusion(WIDTHS, QUICK, HERE, seed=2)
    other.learn(BANKED)
    assert not any(map(torch.equal, made_by(other), made_by(quick)))


def test_what_a_micro_batch_draws_depends_on_nothing_but_its_place(
    quick: LatentDiffusion,
) -> None:
    """So ranks draw for themselves what one rank would have drawn for all."""

    def drawn(model: LatentDiffusion, purpose: str, *places: tuple[int, int]) -> float:
        draw = model.streams.draws(purpose)
        return [torch.rand((), generator=draw(*place)).item() for place in places][-1]

    other = LatentDiffusion(WIDTHS, QUICK, HERE, seed=2)
    first = drawn(quick, "autoencoder", (3, 1))
    assert first == drawn(quick, "autoencoder", (0, 0), (3, 0), (3, 1))
    others = [
        drawn(quick, "autoencoder", place) for place in ((3, 0), (1, 3), (3, 2), (4, 1))
    ]
    others += [drawn(quick, "denoiser", (3, 1)), drawn(other, "autoencoder", (3, 1))]
    assert len({first, *others}) == 7


def test_building_and_learning_leave_the_global_stream_of_numbers_alone(
    one_thread: None,
) -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    LatentDiffusion(WIDTHS, QUICK, HERE, seed=1).learn(BANKED)
    assert torch.equal(torch.rand(3), expected)


def test_learning_again_goes_on_from_what_was_learnt(one_thread: None) -> None:
    learning = LatentDiffusion(WIDTHS, QUICK, HERE, seed=1)
    learning.learn(BANKED)
    before = [
        p.detach().clone()
        for name in NETWORKS
        for p in getattr(learning, name).parameters()
    ]
    learning.options = QUICK.model_copy(
        update={"server_lr": 1e-12}
    )  # steps that lead nowhere
    learning.learn(BANKED)
    after = [
        p.detach() for name in NETWORKS for p in getattr(learning, name).parameters()
    ]
    torch.testing.assert_close(after, before)


def test_what_learning_needed_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's objects hold each other; a large server's moments must not wait for
    the collector's next turn.
    """
    made: list[weakref.ref[Any]] = []

    def circular(*args: Any, **kwargs: Any) -> Any:
        learning: Any = make_trainer(*args, **kwargs)
        learning.itself = learning
        made.extend(weakref.ref(it) for it in (learning, learning.network))
        return learning

    monkeypatch.setattr(server_learning, "make_trainer", circular)
    monkeypatch.setattr(server_learning, "LARGE", 1)
    gc.disable()
    try:
        LatentDiffusion(WIDTHS, QUICK, HERE, seed=1).learn(BANKED)
        assert len(made) == 4 and all(it() is None for it in made)
    finally:
        gc.enable()


def test_rows_pass_in_parts_that_fit(
    quick: LatentDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made_by(quick)
    made: dict[str, dict[Any, int]] = {name: {} for name in NETWORKS}
    most = 0

    def seen(name: str, stage: Any, output: Tensor) -> None:
        nonlocal most
        most = max(most, output.numel())
        made[name][stage] = output[0].numel()

    stages = {
        "autoencoder": [*quick.autoencoder.encoder, *quick.autoencoder.decoder],
        "denoiser": quick.denoiser.stages,
    }
    hooks = [
        stage.register_forward_hook(
            lambda stage, inputs, output, name=name: seen(name, stage, output)
        )
        for name in NETWORKS
        for stage in stages[name]
    ]
    monkeypatch.setattr(server_networks, "AT_ONCE", 3 * quick.autoencoder.widest)
    for part, expected in zip(made_by(quick), whole, strict=True):
        torch.testing.assert_close(part, expected)
    for hook in hooks:
        hook.remove()
    for name, own in made.items():
        assert max(own.values()) == getattr(quick, name).widest
        assert sum(own.values()) == getattr(quick, name).activations
    assert most <= 3 * quick.autoencoder.widest


def test_checkpointing_learns_the_same(quick: LatentDiffusion) -> None:
    learning = LatentDiffusion(
        WIDTHS, QUICK.model_copy(update={"server_checkpointing": True}), HERE, seed=1
    )
    learning.learn(BANKED)
    for made, expected in zip(made_by(learning), made_by(quick), strict=True):
        torch.testing.assert_close(made, expected)


def test_accumulated_micro_batches_are_one_step(one_thread: None) -> None:
    """Against a step written out: the mean over both micro-batches, AdamW, and the rate
    of a cosine.
    """
    options = QUICK.model_copy(
        update={"server_micro_batch": 4, "server_lr": 1e-2, "server_decay": 0.1}
    )
    data = torch.randn(6, 4, 30, generator=torch.Generator().manual_seed(0))
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(Autoencoder(30, TINY))
    plan = TrainingPlan(options, batching(options, 1, "autoencoder"), HERE, steps=3)
    learning = make_trainer(networks[0], plan)
    assert isinstance(learning, PlainTrainer)
    losses = learning.fit(
        lambda network, step, number: network(data[2 * step + number]),
        3,
        lambda done, losses: None,
    )
    optimizer = torch.optim.AdamW(networks[1].parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + np.cos(np.pi * step / 3)) / 2
        loss = (networks[1](data[2 * step]) + networks[1](data[2 * step + 1])) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-5)


def test_a_network_that_diverges_is_named_and_stops_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, "CHECK_EVERY", 4)
    options = QUICK.model_copy(
        update={"server_lr": 1e30, "autoencoder_samples": 40 * QUICK.server_batch}
    )
    done: list[int] = []
    with pytest.raises(
        ArithmeticError,
        match=r"autoencoder .* from step 2 of 40 on; try --server-lr below 1e\+30$",
    ):
        LatentDiffusion(WIDTHS, options, HERE, seed=1).learn(
            BANKED, lambda name, step, steps, losses: done.append(step)
        )
    assert done == [1, 2, 3, 4]
    coarse = QUICK.model_copy(update={"server_precision": "bf16"})
    with pytest.raises(
        ArithmeticError, match=r"denoiser .* or --server-precision fp32$"
    ):
        check_losses("denoiser", np.array([1.0, np.inf]), coarse)


def test_the_denoiser_may_have_a_batch_of_its_own(one_thread: None) -> None:
    options = QUICK.model_copy(update={"denoiser_batch": 2 * QUICK.server_batch})
    report = LatentDiffusion(WIDTHS, options, HERE, seed=1).learn(BANKED)
    steps = {name: len(losses) for name, losses in report.losses.items()}
    assert steps == num_steps(options)
    assert steps["autoencoder"] == -(-options.autoencoder_samples // QUICK.server_batch)
    assert steps["denoiser"] == -(-options.denoiser_samples // (2 * QUICK.server_batch))
    assert report.samples["denoiser"] == steps["denoiser"] * 2 * QUICK.server_batch
    with pytest.raises(
        UserError, match="--denoiser-batch 9 cannot be shared by 2 server ranks"
    ):
        ServerOptions(server_batch=8, denoiser_batch=9).check_ranks(2)


@pytest.mark.gpu
@pytest.mark.own_kernels  # CUDA's graphs come with them
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_passes_learn_the_same(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As passes that are launched one by one; trial passes of the capture leave no
    trace in the statistics.
    """
    slot = RankSlot(torch.device("cuda", 0))
    options = QUICK.model_copy(
        update={"server_precision": precision, "server_engine": "torch"}
    )

    def learnt() -> tuple[LearningReport, dict[str, Tensor]]:
        learning = LatentDiffusion(WIDTHS, options, slot, seed=1)
        return learning.learn(BankedRows.of(BANK.cuda(), WIDTHS)), dict(
            learning.autoencoder.named_buffers()
        )

    captured, statistics = learnt()
    monkeypatch.setattr(capture, "uncaptured", lambda *_: "the test says so")
    launched, expected = learnt()
    tolerance = 1e-4 if precision == "fp32" else 0.02
    for name in NETWORKS:
        np.testing.assert_allclose(
            captured.losses[name], launched.losses[name], rtol=tolerance
        )
    torch.testing.assert_close(
        statistics, expected, rtol=10 * tolerance, atol=tolerance
    )


def test_the_peak_of_memory_outlasts_a_count_that_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed sets it back when it starts ZeRO for the second network, which needs
    less than the first.
    """
    counts = iter([100, 900, 10, 300])

    def counted(device: torch.device) -> int:
        return next(counts, 20)

    for module in (report, server_learning):
        monkeypatch.setattr(module, "peak_memory", counted)
    assert LatentDiffusion(WIDTHS, QUICK, HERE, seed=1).learn(BANKED).peak_here == 900
    assert next(counts, None) is None, "all were asked for"


# Saved servers


def loaded(
    path: Path, widths: list[int] = WIDTHS, seed: int = 1, **changed: Any
) -> LatentDiffusion:
    return LatentDiffusion(
        widths,
        QUICK.model_copy(update={"server_load": str(path), **changed}),
        HERE,
        seed=seed,
    )


@pytest.fixture
def saved(quick: LatentDiffusion, tmp_path: Path) -> Path:
    quick.save(tmp_path / "server.h5")
    return tmp_path / "server.h5"


def test_a_loaded_server_generates_the_same_to_the_bit(
    quick: LatentDiffusion, saved: Path
) -> None:
    again = loaded(saved)
    assert again.is_trained
    assert all(map(torch.equal, made_by(again), made_by(quick)))
    again.save(saved.with_name("again.h5"))
    assert all(
        map(torch.equal, made_by(loaded(saved.with_name("again.h5"))), made_by(quick))
    )


def test_a_loaded_server_learns_on_as_the_saved_one_would(
    saved: Path, one_thread: None
) -> None:
    straight = LatentDiffusion(WIDTHS, QUICK, HERE, seed=1)
    straight.learn(BANKED)
    straight.learn(BANKED)
    resumed = loaded(saved)
    resumed.learn(BANKED)
    assert all(map(torch.equal, made_by(resumed), made_by(straight)))


def test_a_loaded_server_may_be_used_otherwise(
    quick: LatentDiffusion, saved: Path
) -> None:
    """What does not shape the networks is this run's own, such as the seed, the depth
    or the learning rate.
    """
    other = loaded(saved, seed=5, inversion_depth=3, server_lr=0.5, server="paper")
    assert torch.equal(other.reconstruct(BANK), quick.reconstruct(BANK))
    assert not torch.equal(other.sample(2), quick.sample(2))


def refused(path: Path, widths: list[int] = WIDTHS, **changed: Any) -> str:
    with pytest.raises(UserError) as caught:
        loaded(path, widths, **changed)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"--server-load {path} ")
    return line


def test_a_server_of_other_columns_is_refused(saved: Path) -> None:
    assert "other columns" in refused(saved, [300, 101])
    assert "other columns" in refused(saved, [100, 300])


@pytest.mark.parametrize(
    "name", ["server_width", "server_latent", "server_depth", "diffusion_steps"]
)
def test_a_server_of_another_size_is_refused_and_its_size_told(
    name: str, saved: Path
) -> None:
    right = getattr(QUICK, name)
    assert f"--{name.replace('_', '-')} {right}" in refused(saved, **{name: right + 1})


def test_each_network_has_its_own_depth() -> None:
    """The denoiser's convolutions rise and fall: 2 · 4 − 3 = 5, and 2 · 6 − 3 = 9."""
    options = ServerOptions(server_width=1, server_depth=4, denoiser_depth=6)
    assert len(encoder_channels(options.size)) == 4
    assert denoiser_channels(options.size) == [1, 2, 4, 8, 16, 8, 4, 2, 1]
    alone = ServerOptions(server_width=1, server_depth=4)
    assert denoiser_channels(alone.size) == [1, 2, 4, 2, 1]


def test_a_denoiser_of_another_depth_is_refused(saved: Path) -> None:
    assert "--denoiser-depth 2" in refused(saved, denoiser_depth=5)
    loaded(saved, denoiser_depth=QUICK.server_depth)


def test_files_from_before_the_denoisers_own_depth_load(
    quick: LatentDiffusion, saved: Path
) -> None:
    with h5py.File(saved, "r+") as file:
        written = json.loads(file["options"].asstr()[()])
        assert written.pop("denoiser_depth", "missing") is None
        del file["options"]
        file["options"] = json.dumps(written)
    assert torch.equal(loaded(saved).reconstruct(BANK), quick.reconstruct(BANK))


class _Trap:
    """Calls `exit` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("unpickled",)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(_Trap())])
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "server.h5"
    path.write_bytes(content)
    assert "not a saved server" in refused(path)


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "not a saved server" in refused(tmp_path)
    assert "not a saved server" in refused(tmp_path / "nothing.h5")


def test_another_hdf5_file_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["rounds"] = np.arange(3)
    assert "not a server" in refused(tmp_path / "run.h5")


@pytest.mark.parametrize(
    "broken",
    [
        lambda file: file.pop("autoencoder"),
        lambda file: file.pop("latents/scale"),
        lambda file: file.pop("denoiser/last.weight"),
        lambda file: file.pop("options"),
        lambda file: file.attrs.pop("widths"),
        lambda file: file.attrs.update(schema=1),
        lambda file: file.create_dataset("standard/strange", data=1.0),
        lambda file: (file.pop("options"), file.create_dataset("options", data="{")),
        lambda file: (
            file.pop("options"),
            file.create_dataset("options", data=json.dumps({"server": "huge"})),
        ),
        lambda file: (
            file.pop("denoiser/last.bias"),
            file.create_dataset("denoiser/last.bias", data=np.zeros(9)),
        ),
    ],
)
def test_a_damaged_server_is_refused(
    broken: Callable[[h5py.File], object], saved: Path
) -> None:
    with h5py.File(saved, "a") as file:
        broken(file)
    assert "not a s" in refused(saved)


def test_a_saved_server_is_numbers_and_json_and_nothing_is_unpickled(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(saved) as file:
        things: list[h5py.Dataset] = []
        file.visititems(
            lambda name, item: (
                things.append(item) if isinstance(item, h5py.Dataset) else None
            )
        )
        assert {item.dtype.kind for item in things if item.name != "/options"} == {"f"}
        assert json.loads(file["options"][()])["server_width"] == 4

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    for owner, name in [
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ]:
        monkeypatch.setattr(owner, name, forbidden)
    with pytest.raises(AssertionError):
        pickle.load(io.BytesIO(b""))
    assert loaded(saved).is_trained


# Options


@given(st.integers(1, 400), st.integers(0, 50), st.integers(1, 8))
@settings(deadline=None)
def test_a_batch_is_divided_without_rest_or_refused(
    batch: int, micro: int, ranks: int
) -> None:
    options = ServerOptions(server_batch=batch, server_micro_batch=micro)
    possible = (
        batch % ranks == 0
        and batch // ranks % (micro or 1) == 0
        and (micro or batch) >= 2
    )
    if not possible:
        with pytest.raises(UserError, match=r"--server-(batch|micro-batch) \d+ "):
            batching(options, ranks, "autoencoder")
        return
    divided = batching(options, ranks, "autoencoder")
    assert divided.batch == batch and divided.ranks == ranks
    assert divided.micro == (micro or batch // ranks)
    assert divided.micro * divided.accumulation * ranks == batch
    parts = [divided.slice_of(number) for number in range(divided.accumulation * ranks)]
    samples = [(draw, at) for draw, own in parts for at in range(divided.drawn)[own]]
    assert len(set(samples)) == batch, (
        "every sample that is drawn belongs to one micro-batch"
    )
    if not micro:
        assert samples == [(0, at) for at in range(batch)], (
            "on any number of ranks the same draw"
        )


def test_a_batch_that_cannot_be_divided_is_explained() -> None:
    with pytest.raises(
        UserError,
        match="--server-batch 50 cannot be shared by 4 server ranks; use a multiple of 4",
    ):
        batching(ServerOptions(), 4, "autoencoder")
    with pytest.raises(
        UserError,
        match="--server-micro-batch 10 does not divide the 25 samples of a server rank",
    ):
        batching(ServerOptions(server_micro_batch=10), 2, "autoencoder")
    with pytest.raises(
        UserError, match="leaves a micro-batch of 1; batch norm needs two samples"
    ):
        batching(ServerOptions(server_micro_batch=1), 2, "autoencoder")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"generated_layers": 9},
            "--generated-layers 9, but mlp has 2 layers with weights",
        ),
        ({"bank_rounds": 11}, "--bank-rounds 11, but the run has only 10 rounds"),
        ({"server_every": 11}, "--server-every 11, but the run has only 10 rounds"),
        (
            {"inversion_depth": 1001},
            "--inversion-depth 1001 is beyond --diffusion-steps 1000",
        ),
        (
            {"diffusion_steps": 50},
            "--inversion-depth 100 is beyond --diffusion-steps 50",
        ),
        (
            {"server_offload": "optimizer"},
            "--server-offload optimizer needs --zero-stage 1, 2 or 3",
        ),
        (
            {"server_offload": "parameters"},
            "--server-offload parameters needs --zero-stage",
        ),
        (
            {"server_offload": "parameters", "zero_stage": 2},
            "--server-offload parameters needs --zero-stage 3",
        ),
    ],
)
def test_options_that_do_not_fit_the_run_are_refused(
    given: dict[str, Any], line: str
) -> None:
    config = RunConfig(method="pfedgpa", rounds=10, model="mlp")
    fine: dict[str, Any] = {"bank_rounds": 10}
    ServerOptions(**fine).check(config)
    with pytest.raises(UserError) as caught:
        ServerOptions(**fine | given).check(config)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"server_offload": "optimizer", "zero_stage": 1},
        {"server_offload": "parameters", "zero_stage": 3},
        {"inversion_depth": 1000},
        {"server_every": 10},
        {"generated_layers": 2},
    ],
)
def test_options_at_their_limits_fit(given: dict[str, Any]) -> None:
    ServerOptions(**{"bank_rounds": 10} | given).check(
        RunConfig(method="pfedgpa", rounds=10, model="mlp")
    )


@pytest.mark.parametrize(
    ("given", "ranks", "line"),
    [
        (
            {"server_latent": 101},
            1,
            "a latent of 101 is larger than the 100 generated columns; use a smaller",
        ),
        (
            {"server": "paper"},
            1,
            "a latent of 256 is larger than the 100 generated columns; use a smaller",
        ),
        (
            {"server_engine": "torch"},
            2,
            "--server-engine torch is a plain loop on one rank",
        ),
        (
            {"server_engine": "torch", "zero_stage": 1},
            1,
            "--server-engine torch is a plain loop on one rank",
        ),
        (
            {"server_batch": 51},
            2,
            "--server-batch 51 cannot be shared by 2 server ranks",
        ),
    ],
)
def test_options_that_do_not_fit_columns_and_ranks_are_refused(
    given: dict[str, Any], ranks: int, line: str
) -> None:
    def judge(options: ServerOptions) -> None:
        check_columns(options, 100)
        options.check_ranks(ranks)

    judge(ServerOptions(server="small", server_latent=100))
    with pytest.raises(UserError) as caught:
        judge(ServerOptions(**{"server": "small"} | given))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_sizes_are_presets_that_single_options_change() -> None:
    assert ServerOptions().size == SIZES["paper"]
    changed = ServerOptions(
        server="large", server_width=3, server_latent=5, server_lr=0.5
    ).size
    assert changed == Size(3, 5, SIZES["large"].depth, 0.5)


@pytest.mark.parametrize(
    ("given", "stage", "offloaded"),
    [
        ({}, 0, set()),
        ({"zero_stage": 2, "server_offload": "optimizer"}, 2, {"offload_optimizer"}),
        (
            {"zero_stage": 3, "server_offload": "parameters"},
            3,
            {"offload_optimizer", "offload_param"},
        ),
        ({"server_precision": "bf16"}, 0, set()),
        ({"server_precision": "bf16", "zero_stage": 3}, 3, set()),
    ],
)
def test_deepspeed_is_told_what_was_asked_for(
    given: dict[str, Any], stage: int, offloaded: set[str]
) -> None:
    options = ServerOptions(server_batch=48, server_micro_batch=6, **given)
    told = configuration(options, batching(options, 4, "autoencoder"), 1000)
    sizes = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    assert [told[name] for name in sizes] == [48, 6, 2]
    assert told["zero_optimization"].pop("stage") == stage
    assert {
        name for name in told["zero_optimization"] if "offload" in name
    } == offloaded
    assert told["zero_optimization"]["reduce_bucket_size"] == 1024, (
        "buffers are hardly larger than the network"
    )
    bf16 = options.server_precision == "bf16"
    assert (told["bf16"]["enabled"], told["torch_autocast"]["enabled"]) == (
        bf16 and stage > 0,
        bf16 and stage == 0,
    )
    assert told["gradient_clipping"] == 0
