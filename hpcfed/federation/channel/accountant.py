"""What uploads reveal: ε after a number of rounds for a given noise, and the noise for
a given ε.

dp-accounting does the computation, by Rényi divergences (rdp) or by privacy loss
distributions (pld), which are tighter. What counts as a neighbour depends on the
sampling:

- poisson: the federation with one client more or less, which changes the sum of a
  round's updates by at most C.
- fixed: the federation with one client replaced by another, which changes it by 2C. So
  the same noise protects half as well.
- always: one client's data replaced by any other data, seen by the receiver of its
  uploads. Every round in which the client takes part counts in full.

dp-accounting is imported only when something is computed: most runs do not need it.
"""

import logging
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch

from hpcfed.errors import UserError, count
from hpcfed.federation.channel import Memory
from hpcfed.options import RunConfig
from hpcfed.options.privacy import LEAST_BY_PLD
from hpcfed.runtime.collectives import Collectives

INTERVAL = 1e-3
"""Grid of privacy losses. Results are upper bounds on any grid. Compared with the
library's 1e-4, this one costs 0.03 % of ε and takes a tenth of the time.
"""
HARDLY_ANY = 1e-6
"""Noise below which ε is so large that float64 cannot tell δ by it. The bound that we then
return is less than a hundred-thousandth too large.
"""
COARSE = 1e-2
"""Grid for rounds before the last: costs up to 1.5 % of ε, takes 20 ms, not 60."""
TOLERANCE = 1e-5
"""How close noise multipliers come to the smallest one that keeps within ε."""
LEAST_NOISE = 0.05
"""Where the search for noise multipliers by rdp ends: ε is in the hundreds there."""
COUNTED_BITS = 4
"""Rounds are counted one by one up to 16, and beyond that in eighths of a power of two:
a privacy loss distribution for each of a thousand rounds would take a minute.
"""


@dataclass(frozen=True)
class Accountant:
    """Accounts for Gaussian noise on the sum of clipped updates."""

    kind: Literal["rdp", "pld"]
    sampling: Literal["poisson", "fixed", "always"]
    cohort: int
    """Clients that a round is expected to have."""
    population: int
    """Clients that a round is sampled from."""
    delta: float

    @property
    def rate(self) -> float:
        """The probability with which a round samples a client."""
        return self.cohort / self.population

    @property
    def sensitivity(self) -> int:
        """How far neighbours are apart, in norms of a clipped update."""
        return 1 if self.sampling == "poisson" else 2

    @property
    def neighbours(self) -> str:
        """What ε compares, in words."""
        if self.sampling == "poisson":
            return "one client more or less"
        if self.sampling == "fixed":
            return "one client in another's place"
        return "other data of the client"

    def epsilon(self, noise_multiplier: float, rounds: int) -> float:
        """Return ε after `rounds` with noise of `noise_multiplier` × C on sums."""
        return _epsilon_on(self, noise_multiplier, rounds, INTERVAL)

    def epsilons(self, noise_multiplier: float, rounds: int) -> np.ndarray:
        """Return upper bounds of ε after each of `rounds` rounds; the last is the best.

        Most are the ε of a slightly later round, on a coarser grid: 1500 rounds take
        1.4 s by pld, on one ARM core.
        """
        return _spending(self, noise_multiplier, rounds)

    def noise_multiplier(self, epsilon: float, rounds: int) -> float:
        """Return the smallest noise multiplier that keeps within ε."""
        return _calibrated(self, epsilon, rounds)


@cache
def _spending(accountant: Accountant, noise: float, rounds: int) -> np.ndarray:
    # The last round's ε is printed, so it alone is computed on the fine grid.
    last = accountant.epsilon(noise, rounds)
    found = np.full(rounds, last)
    first = 0
    while first < rounds:
        # Rounds up to this one share its ε.
        counted = _rounded_up(first + 1)
        if counted < rounds:
            so_far = _epsilon_on(accountant, noise, counted, COARSE)
            # ε never falls from round to round, so the last one bounds all others.
            found[first:counted] = min(so_far, last)
        first = counted
    return found


def _epsilon_on(
    accountant: Accountant, noise: float, rounds: int, interval: float
) -> float:
    if accountant.kind == "pld":
        return _epsilon_by_pld(accountant, noise, rounds, interval)
    return _epsilon_by_rdp(accountant, noise, rounds)


@cache
def _epsilon_by_pld(
    accountant: Accountant, noise: float, rounds: int, interval: float
) -> float:
    if accountant.sampling == "always":
        # n sums with Gaussian noise are like one sum with noise smaller by √n.
        noise = noise / accountant.sensitivity / math.sqrt(rounds)
        return _epsilon_of_gaussian(noise, accountant.delta)
    loss = _loss_of_one_round(accountant, noise, interval).self_compose(rounds)
    return float(loss.get_epsilon_for_delta(accountant.delta))


def _epsilon_of_gaussian(noise: float, delta: float) -> float:
    """Return ε of one sum, in closed form: with little noise, losses are large, and a
    grid of them would take minutes.
    """
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
    from scipy.optimize import brentq

    # The bound by Rényi divergences: ε is below it.
    most = (0.5 / noise + math.sqrt(2 * math.log(1 / delta))) / noise
    if noise < HARDLY_ANY:
        return most
    loss = GaussianPrivacyLoss(noise)
    if loss.get_delta_for_epsilon(0.0) <= delta:
        return 0.0
    return float(
        brentq(lambda found: loss.get_delta_for_epsilon(found) - delta, 0.0, most)
    )


@cache
def _loss_of_one_round(accountant: Accountant, noise: float, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    assert accountant.sampling != "fixed", "the library has no such distribution"
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise / accountant.sensitivity,
        sampling_prob=accountant.rate,
        value_discretization_interval=interval,
    )


def _epsilon_by_rdp(accountant: Accountant, noise: float, rounds: int) -> float:
    from dp_accounting.rdp import compute_epsilon

    orders, divergences = _divergences_of_one_round(accountant, noise)
    # Divergences of rounds add up.
    epsilon, _ = compute_epsilon(orders, rounds * divergences, accountant.delta)
    return float(epsilon)


@cache
def _divergences_of_one_round(
    accountant: Accountant, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    made = _library_accountant(accountant)
    made.compose(_round_event(accountant, noise))
    return made.orders, made.rdp


@cache
def _calibrated(accountant: Accountant, epsilon: float, rounds: int) -> float:
    if accountant.sampling == "poisson":
        ever_drawn = 1 - (1 - accountant.rate) ** rounds
        # A client that is hardly ever drawn is private without any noise.
        if ever_drawn <= accountant.delta:
            raise _needless(accountant, epsilon)
    if accountant.kind == "rdp":
        return _searched_by_rdp(accountant, epsilon, rounds)
    if accountant.sampling == "always":
        return _gaussian_for(accountant, epsilon, rounds)
    # A coarse grid overestimates ε, so noise that suffices there suffices on the fine
    # one.
    enough = _searched_by_pld(accountant, epsilon, rounds, 1.0, COARSE)
    return _searched_by_pld(accountant, epsilon, rounds, enough, INTERVAL)


def _searched_by_pld(
    accountant: Accountant, epsilon: float, rounds: int, guess: float, grid: float
) -> float:
    """Return the smallest noise that keeps within ε, on a grid of privacy losses."""
    from scipy.optimize import brentq

    def excess(noise: float) -> float:
        return _epsilon_by_pld(accountant, noise, rounds, grid) - epsilon

    enough = guess
    while excess(enough) > 0:
        enough *= 2
    # Search from above: the less noise, the wider the distributions.
    lower, step = enough, 0.98
    while excess(lower) <= 0:
        if lower == LEAST_BY_PLD:
            raise _needless(accountant, epsilon)
        enough, lower = lower, max(step * lower, LEAST_BY_PLD)
        step = max(step**2, 0.5)
    found = brentq(excess, lower, enough, xtol=TOLERANCE / 2)
    # Add what the search may miss, so that ε is kept.
    return min(float(found) + TOLERANCE / 2, enough)


def _gaussian_for(accountant: Accountant, epsilon: float, rounds: int) -> float:
    """Return the noise of sums that always include the client, in closed form."""
    from dp_accounting.pld.common import DifferentialPrivacyParameters
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    wanted = DifferentialPrivacyParameters(epsilon, accountant.delta)
    once = GaussianPrivacyLoss.from_privacy_guarantee(wanted).standard_deviation
    return float(once * accountant.sensitivity * math.sqrt(rounds))


def _searched_by_rdp(accountant: Accountant, epsilon: float, rounds: int) -> float:
    from dp_accounting import (
        LowerEndpointAndGuess,
        SelfComposedDpEvent,
        calibrate_dp_mechanism,
    )
    from dp_accounting.mechanism_calibration import NoBracketIntervalFoundError

    try:
        found = calibrate_dp_mechanism(
            partial(_library_accountant, accountant),
            lambda noise: SelfComposedDpEvent(_round_event(accountant, noise), rounds),
            epsilon,
            accountant.delta,
            LowerEndpointAndGuess(LEAST_NOISE, 1.0),
            tol=TOLERANCE,
        )
    except NoBracketIntervalFoundError:
        raise _needless(accountant, epsilon) from None
    return float(found)


def _needless(accountant: Accountant, epsilon: float) -> UserError:
    return UserError(
        f"hardly any noise keeps within --target-epsilon {epsilon:g} at δ = "
        f"{accountant.delta:.2g}; give a smaller --delta, or --noise-multiplier"
    )


def _library_accountant(accountant: Accountant) -> Any:
    """Return the library's accountant by Rényi divergences."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    # It warns of each order that rdp has to skip; a skipped order costs a little of ε.
    logging.getLogger("absl").setLevel(logging.ERROR)
    neighbours = NeighboringRelation.ADD_OR_REMOVE_ONE
    if accountant.sampling == "fixed":
        neighbours = NeighboringRelation.REPLACE_ONE
    return RdpAccountant(neighboring_relation=neighbours)


def _round_event(accountant: Accountant, noise: float) -> Any:
    """Describe one round to the library, which expects noise divided by sensitivity."""
    import dp_accounting as dp

    noised = dp.GaussianDpEvent(noise / accountant.sensitivity)
    if accountant.sampling == "poisson":
        return dp.PoissonSampledDpEvent(accountant.rate, noised)
    if accountant.sampling == "fixed":
        return dp.SampledWithoutReplacementDpEvent(
            accountant.population, accountant.cohort, noised
        )
    return noised


def _rounded_up(rounds: int) -> int:
    """Return the smallest number that is at least `rounds` and has few leading bits."""
    # Multiples of a power of two that leaves COUNTED_BITS leading bits.
    step = 1 << max(0, (rounds - 1).bit_length() - COUNTED_BITS)
    return -(-rounds // step) * step


def accountant_of(config: RunConfig) -> Accountant:
    """Return the accountant for the privacy of a run."""
    if config.privacy == "local":
        delta = config.accounted_delta
        return Accountant(config.accountant, "always", 1, 1, delta)
    return Accountant(
        config.accountant,
        config.sampling,
        config.accounted_cohort,
        config.accounted_population,
        config.accounted_delta,
    )


def noise_multiplier_of(config: RunConfig) -> float:
    """Return z of a private run: as given, or the smallest that meets its ε."""
    if config.noise_multiplier is not None:
        return config.noise_multiplier
    assert config.target_epsilon is not None
    accountant = accountant_of(config)
    found = accountant.noise_multiplier(config.target_epsilon, config.rounds)
    # Rounded up, so that ranks on different hardware get exactly the same number.
    return math.ceil(found * 1e6) / 1e6


def guarantee(config: RunConfig) -> str:
    """Say in one line which ε a private run has, and what it protects."""
    if config.sample_noise is not None:
        return _guarantee_of_samples(config, config.sample_noise)
    if config.clips_alone:
        return "no ε holds: updates are clipped, and z = 0 adds no noise"
    accountant, multiplier = accountant_of(config), noise_multiplier_of(config)
    epsilon = accountant.epsilon(multiplier, config.rounds)
    said = (
        f"ε = {epsilon:.3g} after {count(config.rounds, 'round')} at δ = "
        f"{accountant.delta:.2g} (z = {multiplier:.4g}, {accountant.kind}); neighbours: "
        f"{accountant.neighbours}; "
    )
    if config.privacy == "local":
        return said + "every round in which a client takes part counts in full"
    said += f"{accountant.sampling} sampling at rate {accountant.rate:.3g}"
    if config.hypothetical:
        cohort, population = f"{accountant.cohort:,}", f"{accountant.population:,}"
        said += f", as if rounds had {cohort} of {population} clients"
    return said


def _guarantee_of_samples(config: RunConfig, multiplier: float) -> str:
    if not multiplier:
        return "no ε holds: samples' gradients are clipped, and z = 0 adds no noise"
    return (
        f"DP-SGD within clients at δ = {config.delta:.2g} (z = {multiplier:.4g}, "
        f"{config.accountant}); rounds/epsilon has ε of the sample that was trained on "
        "most often, one release an epoch; neighbours: another sample in its place"
    )


# What DP-SGD within clients has spent: how often samples were trained on, and their ε.
#
# A neighbour has one sample replaced by another, which changes the sum of a step's
# clipped gradients by 2C. A sample is in one step per epoch, so n epochs are n Gaussian
# releases.


@dataclass
class SampleSpending:
    """Counts releases of clients' samples; checkpoints hold them."""

    config: RunConfig
    memory: Memory
    collectives: Collectives

    def add(self, clients: np.ndarray, times: np.ndarray) -> None:
        """Add how often samples of these clients, by position, were trained on."""
        at = torch.from_numpy(clients)
        self._releases()[at] += torch.from_numpy(times.astype(np.int64))

    def epsilon(self) -> float:
        """Return ε of the sample trained on most often, on the root; all ranks call."""
        here = int(self._releases().max()) if self.memory.num_clients else 0
        most = max(self.collectives.allgather(here))
        multiplier, delta = self.config.sample_noise, self.config.delta
        if not self.collectives.world.is_root or not multiplier or delta is None:
            return math.nan
        accountant = Accountant(self.config.accountant, "always", 1, 1, delta)
        return accountant.epsilon(multiplier, most) if most else 0.0

    def _releases(self) -> torch.Tensor:
        return self.memory.owned("releases", torch.zeros((), dtype=torch.int64))
