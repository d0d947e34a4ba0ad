"""The server's model of a run: where it runs, how to reach it, what can be wrong.

Most runs have none, so its code is loaded where one is found.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcfed.clients.network import client_layout, tried_network
from hpcfed.errors import UserError, remark
from hpcfed.experiment.materials import set_arithmetic
from hpcfed.models.layout import Layout
from hpcfed.options import Settings
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.world import World
from hpcfed.server.options import server_options
from hpcfed.server.schedule import banked_rows, check_columns, generated

if TYPE_CHECKING:
    from hpcfed.server.transport import Transport


def open_transport(
    settings: Sequence[Settings], layout: Layout, world: World
) -> "Transport | None":
    """Connect to the server's model, if there is one; stacked seeds share it."""
    options = server_options(settings[0])
    if options is None:
        return None
    from hpcfed.server.transport import Colocated, Remote

    if world.server_ranks:
        return Remote(world)
    widths = generated(layout, options).widths
    seeds = [one.config.seed for one in settings]
    # Each seed counts itself what it sends. So the transport gets separate collectives,
    # whose count is not read.
    return Colocated(widths, options, Collectives(world), seeds=seeds)


def what_follows(settings: Settings) -> str:
    """Return what follows the last round and is not in the time of others; empty if
    nothing does.
    """
    options = server_options(settings)
    # If it learns in every round, all times have it.
    if options is None or options.server_overlap or options.server_every == 1:
        return ""
    return ", then the server learns"


def serve_model(settings: Settings, world: World) -> None:
    """Answer requests on a server rank, from the first to the last."""
    from hpcfed.server.transport import serve

    options = server_options(settings)
    config = settings.config
    assert options is not None, "a server rank without a server's model"
    set_arithmetic(config)
    # The network is built only for its layout: a server rank has no clients.
    widths = generated(client_layout(config), options).widths
    serve(world, widths, options, seeds=config.seeds or (config.seed,))


def choose_server(
    settings: Settings, *, gpu: bool, memory: int = 0, ranks: int = 1
) -> Settings:
    """Return the settings completed by what depends on the server's device, with this
    many bytes (0: unknown), and columns; `ranks` ranks train its model.
    """
    options = server_options(settings)
    if options is None:
        return settings
    from hpcfed.server.auto import server_choices

    config = settings.config
    layout = client_layout(config)
    chosen_before = {choice.option for choice in settings.choices}
    made = server_choices(
        options,
        layout,
        rounds=config.rounds,
        uploads=banked_rows(options, config),
        gpu=gpu,
        memory=memory,
        ranks=ranks,
        given=options.model_fields_set - chosen_before,
    )
    return settings.adapted(made)


def check_server(settings: Settings, world: World) -> None:
    """Refuse a server's model that does not fit the ranks or the network, and say what
    a large bank will take.

    Call it once the device is known, since the device decides the model's size.
    """
    options = server_options(settings)
    if options is None:
        return
    from hpcfed.server.auto import bank_line
    from hpcfed.server.fitting import INSTEAD, shortage
    from hpcfed.server.transport import check_world

    check_network(settings)
    check_world(options, world)
    uploads = banked_rows(options, settings.config)
    ranks = len(world.server_locations)
    layout = client_layout(settings.config)
    columns = len(generated(layout, options).at)
    memory = smallest_memory(world)
    why = shortage(options, columns, uploads=uploads, ranks=ranks, memory=memory)
    if why:
        raise UserError(f"{why}; use {INSTEAD[options.server_model]}")
    line = bank_line(options, layout, uploads=uploads, ranks=ranks)
    if line and world.is_root:
        remark(line)


def smallest_memory(world: World) -> int:
    """Return the bytes of the smallest device that the server's model has."""
    return min(location.memory for location in world.server_locations)


def check_network(settings: Settings) -> None:
    """Refuse a network that cannot be built, or does not fit the options."""
    options, config = settings.options, settings.config
    of_server = server_options(settings)
    own = config.model_info() is None
    if of_server is None and not options.names_layers and not own:
        return
    layout = client_layout(config, tried_network(config))
    if of_server is not None:
        if of_server.server == "auto":
            # The device is still unknown. What does not fit the tiny model fits none.
            of_server = of_server.model_copy(update={"server": "tiny"})
        columns = generated(layout, of_server).at
        check_columns(of_server, len(columns))
    # For networks of the catalogue, the number of layers is already checked.
    if options.names_layers or own:
        options.check_layout(layout, config.network())
