"""Curvature matrices of neural networks as scipy linear operators that also speak torch."""

from curvops._algebra import Identity as Identity
from curvops._algebra import SubmatrixLinearOperator as SubmatrixLinearOperator
from curvops._operator import LinearOperator as LinearOperator
from curvops.diagonal_ggn import GGNDiagonalLinearOperator as GGNDiagonalLinearOperator
from curvops.diagonal_ggn import GGNUnitWiseLinearOperator as GGNUnitWiseLinearOperator
from curvops.kfac.ekfac import EKFACLinearOperator as EKFACLinearOperator
from curvops.kfac.kfoc import KFOCLinearOperator as KFOCLinearOperator
from curvops.kfac.kfoc import TNTLinearOperator as TNTLinearOperator
from curvops.kfac.operator import KFACLinearOperator as KFACLinearOperator
from curvops.kfac.options import FisherType as FisherType
from curvops.kfac.options import KFACType as KFACType
from curvops.kfac.treatment import explain as explain
from curvops.risk import EmpiricalRisk as EmpiricalRisk
