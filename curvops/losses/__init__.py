"""Everything about losses: derivatives at the output, sampling, weights, ignored targets, scale.

A loss is a function of the model's output, a sum of *loss terms* divided by a normalizer; its Hessian at the output is
block-diagonal over terms. ``p = softmax(x)``, ``s = sigmoid(x)``, ``r = x - y``; weights default to 1.

====================  ===========  =====================================================  ==========================
loss                  loss term    Hessian ``H`` of a term                                ``mean`` divides by
====================  ===========  =====================================================  ==========================
MSELoss               last axis    ``2 I``                                                entries
BCEWithLogitsLoss     last axis    ``diag(w (pos_w y + 1 - y) s (1 - s))``                entries
CrossEntropyLoss      class axis   ``m (diag p - p p')``, ``m = sum_c w_c y_c``           ``sum w_y`` of valid targets
  probabilities       class axis   the same                                               terms
NLLLoss               class axis   0 (warns)                                              ``sum w_y`` of valid targets
L1Loss                last axis    0 (warns)                                              entries
KLDivLoss             last axis    0 (warns)                                              entries, or data (batchmean)
SmoothL1Loss          last axis    ``diag(|r| < beta) / beta``                            entries
HuberLoss             last axis    ``diag(|r| < delta)``                                  entries
PoissonNLLLoss        last axis    ``diag(exp x)``; of rates ``diag(y / (x + eps)^2)``    entries
GaussianNLLLoss       last axis    ``diag(1 / v)``                                        entries
  learned variance    (mean, v)    its expectation ``diag(1 / v, 1 / (2 v^2))``           entries of the mean
any other callable    a datum      dense, by autograd                                     data
====================  ===========  =====================================================  ==========================

"Last axis" and "class axis" hold the entries of a term, the others count terms; ``y`` of CrossEntropyLoss is one-hot or
probabilities, smoothed. What ``mean`` divides by is summed over the *whole data set*, so that the risk does not depend
on how the data are cut into batches. Everything is computed in float32 or better.
"""

from curvops.losses._base import OutputLoss as OutputLoss
from curvops.losses._base import OutputView as OutputView
from curvops.losses._base import scale_of as scale_of
from curvops.losses._module import register as register
from curvops.losses.callables import by_autograd as by_autograd
from curvops.losses.elementwise import Elementwise as Elementwise
from curvops.losses.registry import output_loss as output_loss
