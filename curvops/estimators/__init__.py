"""Estimates from products alone, each with its standard error: traces, diagonals, norms, spectra, eigenpairs."""

from curvops.estimators._operand import assume_symmetric as assume_symmetric
from curvops.estimators.eigenpairs import Eigenpairs as Eigenpairs
from curvops.estimators.eigenpairs import top_eigenpairs as top_eigenpairs
from curvops.estimators.estimate import Estimate as Estimate
from curvops.estimators.exchangeable import xdiag as xdiag
from curvops.estimators.exchangeable import xnystrace as xnystrace
from curvops.estimators.exchangeable import xtrace as xtrace
from curvops.estimators.functions import FunctionLinearOperator as FunctionLinearOperator
from curvops.estimators.functions import lanczos_logdet as lanczos_logdet
from curvops.estimators.functions import trace_of_function as trace_of_function
from curvops.estimators.hutchinson import hutchinson_diag as hutchinson_diag
from curvops.estimators.hutchinson import hutchinson_squared_fro as hutchinson_squared_fro
from curvops.estimators.hutchinson import hutchinson_squared_row_norms as hutchinson_squared_row_norms
from curvops.estimators.hutchinson import hutchinson_trace as hutchinson_trace
from curvops.estimators.hutchpp import hutchpp_trace as hutchpp_trace
from curvops.estimators.nystrom import nystrom as nystrom
from curvops.estimators.spectrum import Density as Density
from curvops.estimators.spectrum import LanczosSpectrum as LanczosSpectrum
from curvops.estimators.spectrum import lanczos_approximate_log_spectrum as lanczos_approximate_log_spectrum
from curvops.estimators.spectrum import lanczos_approximate_spectrum as lanczos_approximate_spectrum
