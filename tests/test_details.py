"""What a run records for a page about it alone: who has which classes, where latents lie."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed import cli
from hpcfed.data.partition import class_counts
from hpcfed.errors import UserError
from hpcfed.results.server import MOST_MAPPED
from hpcfed.results.stored import read_details, read_run
from hpcfed.server.report import mapped_uploads, principal_map


def test_samples_are_counted_by_client_and_class() -> None:
    labels = np.array([2, 0, 2, 1, 0])
    lists = [np.array([0, 2, 3]), np.array([], np.int64), np.array([1, 4])]
    counts = class_counts(lists, labels, 3)
    assert counts.tolist() == [[0, 1, 2], [0, 0, 0], [2, 0, 0]]
    assert class_counts([], labels, 3).shape == (0, 3)


def test_latents_lie_on_their_principal_axes() -> None:
    # Along the third column -3 and 3, along the first ±1: 18 of 20 parts of the variance.
    latents = np.array([[0.0, 7, 3], [0, 7, -3], [1, 7, 0], [-1, 7, 0]])
    found = principal_map(latents, np.array([4, 5, 6, 7]))
    np.testing.assert_allclose(found.shares, [0.9, 0.1])
    np.testing.assert_allclose(np.abs(found.places), [[3, 0], [3, 0], [0, 1], [0, 1]], atol=1e-7)  # fmt: skip
    assert found.places[0, 0] * found.places[1, 0] < 0, "on opposite sides"
    alone = principal_map(latents[:1], np.array([4]))
    assert alone.places.tolist() == [[0, 0]]


def test_a_large_bank_has_an_even_choice_of_its_uploads_on_the_map() -> None:
    assert mapped_uploads(3).tolist() == [0, 1, 2]
    many = mapped_uploads(10 * MOST_MAPPED)
    assert len(set(many.tolist())) == MOST_MAPPED
    assert (many[0], many[-1]) == (0, 10 * MOST_MAPPED - 1)


def test_a_run_s_file_has_its_classes_or_says_what_is_wrong(tmp_path: Path) -> None:
    words = ["--model", "mlp", "--clients", "3", "--rounds", "1", "--epochs", "1"]
    cli.main(["run", *words, "--out", str(tmp_path)])
    details = read_details(tmp_path)
    assert details.class_counts.shape == (3, 10)
    samples = read_run(tmp_path).train_samples
    np.testing.assert_array_equal(details.class_counts.sum(1), samples)
    assert details.losses == {} and details.latents is None, "no server"
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file["clients/classes"][0, 0] = -1
    with pytest.raises(UserError, match="clients/classes holds impossible numbers"):
        read_details(tmp_path)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        del file["clients/classes"]
    assert read_details(tmp_path).class_counts.size == 0, "as files of older versions"
