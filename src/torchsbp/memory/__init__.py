"""Memory: predict it, measure it, plan for it."""

from .estimating import Estimate, estimate
from .measuring import Measurement, measure
from .planning import DoesNotFitError, Plan, largest_batch, plan

__all__ = ["DoesNotFitError", "Estimate", "Measurement", "Plan", "estimate", "largest_batch", "measure", "plan"]
