"""Options of the server's model itself: its kind, its size, and what it generates;
imports no torch.
"""

from typing import Literal

from hpcfed.options import LEFT_OUT, Need, Options, option

P_DIFF = Need("--server-model p-diff", lambda run: run.server_model == "p-diff")


class ModelOptions(Options):
    """Which model of rows a server has."""

    server_model: Literal["p-diff", "span", "tokens"] = option(
        "p-diff",
        "model of rows: the paper's autoencoder, which grows with the columns; "
        "coordinates in the space that the uploads span, exact for any number of them; "
        "or a transformer of tokens, whose size does not depend on the columns "
        "(--server auto: span if p-diff would exceed the device's memory)",
        group="server",
        shapes_server=True,
        told="always",
        chosen_later=True,
        chosen_with="server",
    )
    server: Literal["auto", "tiny", "small", "paper", "large"] = option(
        "auto",
        "size of the server's networks; auto: paper on a GPU; on a CPU tiny, with as "
        "many samples as it learns from in half a minute",
        group="server",
        calibration="tiny",
        chosen_later=True,
        shapes_server=True,
        also="server_size",
    )
    server_width: int | None = option(
        None,
        "channels of their first convolution, or width of the denoiser of span and "
        "tokens; fastest as a multiple of 64 (default: by --server)",
        group="server",
        ge=0,
        le=2**16,
        calibration=LEFT_OUT,
        shapes_server=True,
        zero_was_unset=True,
    )
    server_latent: int | None = option(
        None,
        "size of the latent space, or numbers of a token (default: by --server; span: all "
        "dimensions)",
        group="server",
        ge=0,
        le=2**20,
        calibration=LEFT_OUT,
        shapes_server=True,
        zero_was_unset=True,
    )
    server_depth: int | None = option(
        None,
        "convolutions of the encoder, or stages of the denoiser of span and tokens "
        "(default: by --server)",
        group="server",
        ge=0,
        le=200,
        calibration=LEFT_OUT,
        shapes_server=True,
        zero_was_unset=True,
    )
    denoiser_depth: int | None = option(
        None,
        "depth of p-diff's denoiser: it has 2 N − 3 convolutions, at least five "
        "(default: as the encoder's)",
        group="server",
        ge=1,
        le=12,
        calibration=LEFT_OUT,
        shapes_server=True,
        needs=P_DIFF,
    )
    span_variance: float = option(
        1.0,
        "keep the dimensions that have this share of the uploads' variance; 1: all",
        group="server",
        gt=0,
        le=1,
        needs=Need("--server-model span", lambda run: run.server_model == "span"),
    )
    token_window: int = option(
        256,
        "tokens that attend to each other; longer rows pass in several windows",
        group="server",
        ge=1,
        le=2**16,
        needs=Need("--server-model tokens", lambda run: run.server_model == "tokens"),
    )
    generated_layers: int | None = option(
        None,
        "the server generates the last N layers with weights (default: all; p-diff: the "
        "last two of more than 20,000 columns, of which --server auto generates one on "
        "a CPU)",
        group="server",
        follows_network=True,
        ge=0,
        chosen_later=True,
        zero_was_unset=True,
    )
