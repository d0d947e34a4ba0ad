"""The server's model of a run: where it is, how it is reached, and what can be wrong
with it.
"""

from collections.abc import Sequence

from torch import nn

from hpcfed.config import RunConfig, Settings
from hpcfed.experiment.arithmetic import set_arithmetic
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.world import World
from hpcfed.server.columns import generated
from hpcfed.server.options import check_columns, server_options
from hpcfed.server.transport import Colocated, Remote, Transport, check_world, serve


def open_transport(
    settings: Sequence[Settings], layout: Layout, world: World
) -> Transport | None:
    """Open the way to the server's model, where the method has one; stacked seeds share
    it.
    """
    options = server_options(settings[0])
    if options is None:
        return None
    if world.server_ranks:
        return Remote(world)
    widths = generated(layout, options).widths
    seeds = [one.config.seed for one in settings]
    # Each seed counts itself what it sends this way. So the transport has collectives
    # of its own, whose count nobody reads.
    return Colocated(widths, options, Collectives(world), seeds=seeds)


def serve_model(settings: Settings, world: World) -> None:
    """Answer requests on a server rank, from the first to the last."""
    options, config = server_options(settings), settings.config
    assert options is not None, "a server rank without a server's model"
    set_arithmetic(config)
    widths = generated(_layout(config), options).widths
    serve(world, widths, options, seeds=config.seeds or (config.seed,))


def check_server(settings: Settings, world: World) -> None:
    """Refuse a server's model that does not fit the ranks or the network.

    To be called when the device is known: it has decided on the model's size.
    """
    options = server_options(settings)
    if options is not None:
        check_network(settings)
        check_world(options, world)


def check_network(settings: Settings) -> None:
    """Refuse a method's options that do not fit the network of the run."""
    options, config = settings.options, settings.config
    of_server = server_options(settings)
    if of_server is not None:
        if of_server.server == "auto":
            # The device is not known yet; what does not fit the small model fits none.
            of_server = of_server.model_copy(update={"server": "small"})
        columns = generated(_layout(config), of_server).at
        check_columns(of_server, len(columns))
    if options.names_layers:
        options.check_layout(_layout(config), config.network())


def _layout(config: RunConfig) -> Layout:
    return Layout.of(_network(config))


def _network(config: RunConfig) -> nn.Module:
    """Build the network that clients have, without reading their data."""
    data = config.data()
    return build(
        config.network(), shape=data.shape, classes=data.classes, seed=config.seed
    )
