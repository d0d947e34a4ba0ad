"""All checks of settings that can be made before MPI or a device starts."""

from typing import Any

from hpcfed.errors import UserError
from hpcfed.options.aggregation import check_aggregation
from hpcfed.options.compression import check_compression
from hpcfed.options.data import check_data
from hpcfed.options.declare import OptionGroup, facts_of, flag_of, means_off
from hpcfed.options.devices import check_devices
from hpcfed.options.machine import check_server_ranks, check_waiting, check_workers
from hpcfed.options.malicious import check_flip, check_malicious
from hpcfed.options.memory import check_results, check_synthetic
from hpcfed.options.newcomers import NEWCOMERS, check_newcomers
from hpcfed.options.optimiser import (
    check_optimiser,
    check_plain_sgd,
)
from hpcfed.options.partition import check_partition
from hpcfed.options.privacy import check_privacy
from hpcfed.options.recording import check_recording
from hpcfed.options.run import check_run
from hpcfed.options.settings import Settings
from hpcfed.options.task import check_task
from hpcfed.options.training import check_training
from hpcfed.options.weights import check_weights
from hpcfed.runtime.launcher import Launch


def check(settings: Settings, launch: Launch) -> None:
    """Refuse settings that cannot start a run, or that would not do what was asked.

    Later checks rely on earlier ones: the data set is known before its classes are
    counted, and the network before its layers are.
    """
    config, method = settings.config, settings.options
    check_data(config)
    check_partition(config)
    check_training(config)
    check_optimiser(config, method)
    check_recording(config)
    check_run(config, method)
    check_newcomers(config, method)
    check_results(config)
    check_synthetic(config, max(1, launch.size - config.server_ranks))
    check_malicious(config, method)
    check_flip(config, config.dataset, config.data())
    check_task(config)
    check_devices(config, method)
    check_compression(config, method)
    # After the attack's own check: "unknown attack" says more than "changes nothing".
    check_switches(settings)
    check_aggregation(config, method)
    check_privacy(config, method)
    check_weights(config, method)
    if config.sample_noise is not None:
        check_plain_sgd(config, "--sample-noise")
        if config.supplement:
            raise UserError(
                "--sample-noise would not hold with --supplement, which gives one sample "
                "to several clients"
            )
        if config.data().task != "classification":
            raise UserError(
                f"--sample-noise is for classes, and {config.dataset} is for "
                f"{config.data().task}"
            )
    check_server_ranks(config, method, launch)
    check_workers(config, launch)
    check_waiting(config)
    # Without server ranks, all ranks train the server's model.
    method.check_ranks(config.server_ranks or launch.size)
    method.check(config)


def check_switches(settings: Settings) -> None:
    """Refuse options that the user gave but that would have no effect."""
    given = settings.flat()
    for option, wanted in idle(settings).items():
        if option in settings.asked:
            flag = flag_of(option)
            if given.get(option) is False:
                flag = flag.replace("--", "--no-", 1)
            raise UserError(f"{flag} changes nothing without {wanted}")


def idle(settings: Settings) -> dict[str, str]:
    """Find options that would have no effect, and what each of them needs.

    A value that means off, such as `--new-classes 0`, needs nothing.
    """
    run = _AllOptions(settings.config, settings.options)
    fields = settings.fields()
    found = {}
    for option, field in fields.items():
        for need in facts_of(field).needs:
            if not need.met(run):
                found[option] = need.text(run)
    for option, wanted, on in settings.options.switches(settings.config):
        if not on:
            found[option] = wanted
    found |= _replaced(settings)
    return {
        option: wanted
        for option, wanted in found.items()
        if not means_off(fields[option], getattr(run, option))
    }


class _AllOptions:
    """The options of a run and of its method, as attributes of one object."""

    def __init__(self, *groups: OptionGroup) -> None:
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        # The order does not matter: `methods.load` refuses a name that is in both.
        for group in self._groups:
            if hasattr(group, name):
                return getattr(group, name)
        raise AttributeError(name)


def _replaced(settings: Settings) -> dict[str, str]:
    """Find options of local training that the method replaces by its own."""
    config = settings.config
    found = {}
    # Newcomers train by the options of every run, even if the method has its own.
    if config.new_clients == 0:
        for name, replacement in settings.options.replaced().items():
            # Here the batch size still acts: it is the default of --supplement-below.
            if (
                name == "batch_size"
                and config.supplement
                and config.supplement_below is None
            ):
                continue
            reason = f"method {config.method} trains by {flag_of(replacement)}"
            found[name] = f"{NEWCOMERS.wanted}: {reason}"
    return found
