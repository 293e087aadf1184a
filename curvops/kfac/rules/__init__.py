"""Rules: how one use of a parameter becomes canonical. One file for each family of layers."""

# Each file registers its rules.
from curvops.kfac.rules import conv as _conv  # noqa: F401
from curvops.kfac.rules import conv_transpose as _conv_transpose  # noqa: F401
from curvops.kfac.rules import linear as _linear  # noqa: F401
from curvops.kfac.rules._base import Form as Form
from curvops.kfac.rules._base import Operation as Operation
from curvops.kfac.rules._base import register as register
from curvops.kfac.rules._base import rule_for as rule_for
from curvops.kfac.rules._base import supported as supported
