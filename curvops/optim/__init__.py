"""Optimizers over the one curvature engine: preconditioners per block of parameters in one shell."""

from curvops.optim.damping import LevenbergMarquardt as LevenbergMarquardt
from curvops.optim.decompositions import ComputeMethod as ComputeMethod
from curvops.optim.hyperparameters import LambdaParamScheduler as LambdaParamScheduler
from curvops.optim.hyperparameters import exp_decay_factor_averaging as exp_decay_factor_averaging
from curvops.optim.kfac import KFAC as KFAC
from curvops.optim.kfac_preconditioner import KFACPreconditioner as KFACPreconditioner
from curvops.optim.shell import PreconditionedSGD as PreconditionedSGD
from curvops.optim.singd import SINGD as SINGD
