"""Curvature matrices of neural networks as scipy linear operators that also speak torch."""

from curvops._algebra import Identity as Identity
from curvops._algebra import SubmatrixLinearOperator as SubmatrixLinearOperator
from curvops._operator import LinearOperator as LinearOperator
from curvops.kfac.operator import KFACLinearOperator as KFACLinearOperator
from curvops.kfac.options import FisherType as FisherType
from curvops.kfac.options import KFACType as KFACType
from curvops.kfac.treatment import explain as explain
from curvops.risk import EmpiricalRisk as EmpiricalRisk
