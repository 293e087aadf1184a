"""How many samples: a fixed number of products, or until the standard error is small enough."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from curvops._scalars import wide
from curvops.estimators._operand import Operand, check_count
from curvops.estimators.estimate import Estimate, exact

#: Probes before the standard error is believed, and bounds on how fast their number grows.
_FIRST, _LEAST, _MOST = 10, 1.2, 1.6


class Sampler(ABC):
    """An estimator that can go on: more probes make it better, and nothing is computed twice.

    Attributes:
        name: What messages call it.
        cost: Products that each probe takes.
    """

    name: str
    cost: int = 1

    def __init__(self, products: Operand):
        self.products = products
        self.probes = 0

    @abstractmethod
    def add(self, n: int) -> None:
        """Draw ``n`` further probes."""

    @abstractmethod
    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the value and its standard error."""

    def exact_cost(self) -> float:
        """Return how many products the exact value takes: one with every unit vector."""
        return self.products.N

    def exact(self) -> Tensor:
        """Return the exact value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Budget:
    """How far to go: ``num_matvecs`` products, or to a tolerance with ``max_matvecs`` at most."""

    num_matvecs: int | None
    tol: float | None
    rtol: float | None
    max_matvecs: int

    def __post_init__(self) -> None:
        for what in ("tol", "rtol"):
            x = getattr(self, what)
            if x is not None and not (0 <= float(x) < math.inf):
                raise ValueError(f"Got {what}={x}, expected a number >= 0.")
        if (self.num_matvecs is None) == (self.tol is None and self.rtol is None):
            raise ValueError(
                "Give either `num_matvecs`, the number of products, or `tol` or `rtol`, the standard error to reach (with "
                f"`max_matvecs`); got num_matvecs={self.num_matvecs}, tol={self.tol}, rtol={self.rtol}."
            )
        check_count(self.max_matvecs if self.num_matvecs is None else self.num_matvecs, self.limit_name)

    @property
    def limit_name(self) -> str:
        """What the user calls the largest number of products."""
        return "max_matvecs" if self.num_matvecs is None else "num_matvecs"

    def target(self, value: Tensor) -> float:
        """Return the standard error to reach: the larger of both tolerances."""
        size = value.abs().max().item() if self.rtol else 0.0
        return max(self.tol or 0.0, (self.rtol or 0.0) * size)


def run(sampler: Sampler, budget: Budget) -> Estimate:
    """Draw as many probes as the budget says."""
    limit = int(budget.max_matvecs if budget.num_matvecs is None else budget.num_matvecs)
    if sampler.exact_cost() <= (limit if budget.num_matvecs else min(limit, _FIRST * sampler.cost)):
        return _exact(sampler, budget)
    if limit < sampler.cost:
        raise ValueError(
            f"Got {budget.limit_name}={limit}, expected at least {sampler.cost}: a probe of {sampler.name} takes "
            f"{sampler.cost} products."
        )
    if budget.num_matvecs:
        sampler.add(limit // sampler.cost)
        value, stderr = sampler.estimate()
        return Estimate(value, stderr, sampler.products.count, sampler.probes)
    return _to_tolerance(sampler, budget, limit)


def _exact(sampler: Sampler, budget: Budget) -> Estimate:
    value = sampler.exact()
    return exact(value, sampler.products.count, None if budget.num_matvecs else True)


def _to_tolerance(sampler: Sampler, budget: Budget, limit: int) -> Estimate:
    """Go on until the standard error is small enough, or the budget is spent.

    Where the budget allows the exact value, it is taken before that is no longer so, and when going on costs as much.
    """
    before = sampler.products.count
    most = int(min(limit, sampler.exact_cost())) // sampler.cost
    sampler.add(min(_FIRST, most))
    while True:
        value, stderr = sampler.estimate()
        reached, target = stderr.max().item(), budget.target(value)
        if reached <= target:
            return Estimate(value, stderr, sampler.products.count, sampler.probes, True)
        growth = min(max((reached / target) ** 2 if target else math.inf, _LEAST), _MOST)
        probes = min(math.ceil(growth * sampler.probes), most)
        left = limit - (sampler.products.count - before)
        last = probes == most or left - (probes - sampler.probes) * sampler.cost < sampler.exact_cost()
        if last and sampler.exact_cost() <= left:
            return _exact(sampler, budget)
        if probes == sampler.probes:
            break
        sampler.add(probes - sampler.probes)
    warnings.warn(
        f"{sampler.name} stopped at max_matvecs={limit} with a standard error of {reached:.3g}, above the tolerance "
        f"{target:.3g}; raise `max_matvecs` or the tolerance.",
        stacklevel=4,
    )
    return Estimate(value, stderr, sampler.products.count, sampler.probes, False)


class Moments:
    """Running mean and spread of samples, entry by entry (Chan, Golub, LeVeque 1983): sums of squares would cancel."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.spread = torch.zeros(())

    def add(self, samples: Tensor) -> None:
        """Take in samples ``[k, ...]``."""
        k, samples = len(samples), wide(samples)
        mean = samples.mean(0)
        spread = (samples - mean).square().sum(0)
        if self.count == 0:
            self.count, self.mean, self.spread = k, mean, spread
            return
        total = self.count + k
        shift = mean - self.mean
        self.mean = self.mean + shift * (k / total)
        self.spread = self.spread + spread + shift.square() * (self.count * k / total)
        self.count = total

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the mean and its standard error; one sample says nothing about its error."""
        if self.count < 2:
            return self.mean, torch.full_like(self.mean, math.inf)
        return self.mean, (self.spread / (self.count * (self.count - 1))).sqrt()


def moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard error of samples ``[k, ...]``."""
    m = Moments()
    m.add(samples)
    return m.estimate()
