"""The channel between clients and the server: its memory, and what is said of it."""

from pathlib import Path

import pytest
import torch

from hpcfed.errors import UserError
from hpcfed.federation.channel import Memory
from hpcfed.options import RunConfig
from hpcfed.options.channel import CHANNEL, channel_line, channel_parts
from hpcfed.options.traits import MethodTraits
from tests.federations import assembled


def test_memory_begins_with_zeros_and_keeps_what_is_written() -> None:
    memory = Memory(3)
    like = torch.empty(2, dtype=torch.float64)
    rows = memory.owned("residual", like)
    assert rows.tolist() == [[0, 0], [0, 0], [0, 0]]
    rows[1] = 7
    assert memory.owned("residual", like).tolist() == [[0, 0], [7, 7], [0, 0]]
    assert memory.owned("residual", like).dtype == torch.float64


def test_memory_returns_the_first_value_until_one_is_kept() -> None:
    memory = Memory(0)
    first = torch.tensor(0.1)
    assert memory.common("norm", first) is first
    memory.keep("norm", torch.tensor(0.2))
    assert memory.common("norm", first) == torch.tensor(0.2)


@pytest.mark.parametrize("like", [torch.empty(3), torch.empty(2, dtype=torch.int64)])
def test_memory_of_another_kind_is_refused(like: torch.Tensor) -> None:
    """A checkpoint may hold anything."""
    memory = Memory(4, rows={"residual": torch.zeros(4, 2)})
    memory.keep("norm", torch.zeros(2))
    with pytest.raises(UserError, match="the checkpoint's residual"):
        memory.owned("residual", like)
    with pytest.raises(UserError, match="the checkpoint's norm"):
        memory.common("norm", like)


def test_the_channel_of_a_plain_run_is_its_aggregation() -> None:
    assert channel_parts(RunConfig(), MethodTraits()) == ["aggregate: mean"]


def test_the_channel_says_who_attacks_and_who_arrives() -> None:
    config = RunConfig(
        clients=100,
        participation=0.1,
        attack="ipm",
        attackers=3,
        compress="topk",
        keep=0.05,
        devices="lognormal",
        deadline=30,
        oversample=1.3,
        dropout_rate=0.05,
        aggregation="median",
    )
    assert channel_parts(config, MethodTraits()) == [
        "attack: ipm by 3 attackers",
        "compress: the largest 5 % of the columns, error feedback",
        "arrive: within 30 s, the first 10 of 13, 5% lost",
        "aggregate: median",
    ]


@pytest.mark.parametrize(
    "privacy, compress, stages",
    [
        (
            "local",
            "randomk",
            ["Tampering", "Clipping", "LocalNoise", "UploadCompression"],
        ),
        ("central", "topk", ["Tampering", "Clipping", "UploadCompression", "Clipping"]),
    ],
)
def test_words_and_stages_have_the_order_of_the_channel(
    privacy: str, compress: str, stages: list[str]
) -> None:
    s = assembled(
        attack="sign-flip",
        privacy=privacy,
        noise_multiplier=1.0,
        accountant="rdp",
        compress=compress,
        devices="uniform",
    )
    built = s.federation.channel
    assert [type(stage).__name__ for stage in built.stages] == stages
    assert (built.after_mean is not None) == (privacy == "central")
    said = [
        link.partition(":")[0]
        for link in channel_parts(s.settings.config, s.settings.options)
    ]
    asked = {
        "local": {"local noise": "noise"},
        "central": {"clip again": "clip again", "central noise": "noise"},
    }[privacy]
    for part in ("attack", "clip", "compress", "arrive", "aggregate"):
        asked[part] = part
    assert said == [asked[part] for part in CHANNEL if part in asked]


@pytest.mark.parametrize("page", ["README.md", "hpcfed/federation/channel/README.md"])
def test_pages_show_the_channel_in_its_order(page: str) -> None:
    text = (Path(__file__).parents[1] / page).read_text("utf-8")
    assert " → ".join(CHANNEL) in " ".join(text.split())


def test_a_method_without_uploads_has_no_channel() -> None:
    class Silent(MethodTraits):
        uploads = False

    assert channel_line(RunConfig(), Silent()) == ""
