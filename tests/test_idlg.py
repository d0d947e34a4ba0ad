"""iDLG: what a server that steals sees in uploads."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hpcfed.attacks import idlg
from hpcfed.attacks.matching import cosine, squares, total_variation


def test_psnr_by_hand() -> None:
    image = torch.full((1, 3, 4, 4), 0.5)
    assert idlg.psnr(image + 0.1, image) == pytest.approx(20, abs=1e-4)
    assert idlg.psnr(image, image) == float("inf")


def test_losses_by_hand() -> None:
    """(3, 4, 0) beside (3, 0, 4): 16 + 16, and 9 / 25; twice as long, the same angle."""
    target = {"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4])}
    found = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0, 0])}
    twice = {name: 2 * tensor for name, tensor in found.items()}
    assert squares(found, target) == 32
    assert float(cosine(found, target)) == pytest.approx(1 - 9 / 25)
    assert float(cosine(twice, target)) == pytest.approx(1 - 9 / 25)
    image = torch.tensor([[[[0.0, 1, 1], [0, 0, 4]]]])
    # Down 0, 1, 3; across 1, 0 and 0, 4.
    assert float(total_variation(image)) == pytest.approx(4 / 3 + 5 / 4)


def test_the_angle_of_gradients_gives_an_image_away_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hpcfed import cli

    words = "attack idlg --methods fedavg --steps 12 --images 1 --device cpu"
    cli.main([*words.split(), "--loss", "cosine", "--prior", "1e-9"])
    lines = capsys.readouterr().out.splitlines()
    search = "12 steps, cosine loss, total variation × 1e-09"
    assert lines[0] == f"iDLG on digits, smooth network, {search}"
    assert float(lines[2].split()[3]) > 20


def test_a_whole_upload_gives_the_image_away_and_a_part_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpcfed import cli

    figure = tmp_path / "figures" / "stolen.png"
    words = f"attack idlg --steps 8 --images 1 --device cpu --out {figure}"
    cli.main(words.split())
    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[2:7]}
    assert list(table) == ["fedavg", "fedavg-noise", "parfed", "fedlg", "genefl"]
    psnr = {name: float(values[2]) for name, values in table.items()}
    assert (
        psnr["fedavg"]
        > 40
        > psnr["fedavg-noise"]
        > 20
        > max(psnr[name] for name in ("parfed", "fedlg", "genefl"))
    )
    assert table["fedavg"][:2] == ["100.0%", "found"] and table["genefl"][1] == "given"
    from PIL import Image

    drawn = Image.open(figure)
    assert drawn.size == (150 + 104, 8 + 6 * 104)
    pixels = np.asarray(drawn.convert("L"), np.float64) / 255
    original, whole, *_, part = (
        pixels[8 + 104 * n : 104 + 104 * n, 150:246] for n in range(6)
    )
    assert (
        np.abs(original - whole).max() < 0.02 < 0.2 < np.abs(original - part).mean()
    ), "rows are where their names stand"
    assert pixels[:, :150].min() < 0.1, "which are written at the left"


def test_the_label_follows_from_the_gradient() -> None:
    from hpcfed.data.datasets import SyntheticSize
    from hpcfed.data.loading import load as load_data

    digits = load_data(
        "digits",
        root=None,
        download=False,
        seed=0,
        synthetic=SyntheticSize((1, 1, 1), 2, 1, 1),
    )
    network = idlg.smooth(digits.shape, 10, 0).double()
    weights = {name: p.detach() for name, p in network.named_parameters()}
    images = digits.inputs(
        "test", np.arange(40), device=torch.device("cpu"), dtype=torch.float64
    )
    for image, label in zip(images, digits.labels("test")[:40], strict=True):
        gradient = idlg._gradient(
            network, weights, image[None], torch.tensor([int(label)])
        )
        assert int(gradient["head.weight"].sum(1).argmin()) == label
