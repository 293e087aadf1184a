"""Inverses by iteration: operators that solve a linear system for every product."""

from curvops.inverse._solvers import SolveInfo as SolveInfo
from curvops.inverse.operators import CGInverseLinearOperator as CGInverseLinearOperator
from curvops.inverse.operators import LSMRInverseLinearOperator as LSMRInverseLinearOperator
from curvops.inverse.operators import MINRESInverseLinearOperator as MINRESInverseLinearOperator
from curvops.inverse.operators import NeumannInverseLinearOperator as NeumannInverseLinearOperator
