"""The empirical risk: a model, a loss, parameters and data, put together once for every operator."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvops._params import Model, Params, common_kind, named_params
from curvops._traceless import eager, plain, random_state_kept, swapped, torch_random_state
from curvops.losses import output_loss

#: Modules whose train mode makes an output depend on other data or on chance.
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_DROPOUTS = nn.modules.dropout._DropoutNd


class EmpiricalRisk:
    """The function whose curvature is asked for: ``c * sum_n loss(model(x_n), y_n)``.

    ``c`` is 1 for losses with ``reduction="sum"``. For ``"mean"`` it is one over what PyTorch divides by, taken over the
    whole data set: class weights and ignored targets included.

    Args:
        model: A module, or a callable ``(params, x) -> prediction`` that takes a dictionary of tensors.
        loss: A loss module or its functional twin; any callable ``(prediction, target) -> scalar`` is differentiated
            at the output.
        params: Where to differentiate: a dictionary from name to tensor (values may differ from the module's own), a list of
            parameters of the module, or ``None`` for all that require a gradient.
        data: A re-iterable collection of batches ``(X, y)``. ``X`` is a tensor, a mapping (passed as keyword arguments, or
            whole if the model takes one argument) or whatever the model takes. Axis 0 of the prediction carries the data.
        reduction: ``"mean"`` or ``"sum"``, for callable losses only.
        class_dim: Class axis of the prediction for cross-entropy losses, if it is not PyTorch's (axis 1).
        num_data: Number of data; counted if missing, checked if given.
        num_per_example_loss_terms: Loss terms (tokens, pixels) per datum; counted if missing, checked if given.
        batch_size_fn: Number of data in an ``X``, if it is not the length of its first tensor.
        progressbar: Show a progress bar over the batches.
        allow_train_mode: Accept BatchNorm and Dropout in train mode instead of refusing them.

    Raises:
        ValueError: For data that can be read only once, parameters that the model does not have, modules in train mode.
        TypeError: For parameters of mixed or unsupported dtypes.
    """

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        reduction: str | None = None,
        class_dim: int | None = None,
        num_data: int | None = None,
        num_per_example_loss_terms: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        progressbar: bool = False,
        allow_train_mode: bool = False,
    ) -> None:
        self.model = model
        self.loss = output_loss(loss, reduction=reduction, class_dim=class_dim)
        self.params = named_params(model, params)
        self.dtype, self.device = common_kind(self.params)
        self.num_data, self.num_per_example_loss_terms = num_data, num_per_example_loss_terms
        self.batch_size_fn, self.progressbar = batch_size_fn, progressbar
        self.allow_train_mode = allow_train_mode
        self.data = self.checked_data(data)
        self._takes_mappings = _takes_one_argument(model)
        if isinstance(model, nn.Module) and not allow_train_mode:
            _refuse_train_mode(model)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of the operator's space."""
        return tuple(self.params)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters, in the order of the operator's space."""
        return tuple(tuple(p.shape) for p in self.params.values())

    @property
    def replaced(self) -> dict[str, Tensor]:
        """The model's own tensors under the names of the parameters: :meth:`leaves` take their place."""
        if not isinstance(self.model, nn.Module):
            return dict(self.params)
        own = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: own[name] for name in self.params}

    @staticmethod
    def checked_data(data: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
        """Return ``data`` if it can be read more than once."""
        if not isinstance(data, Iterable):
            raise TypeError(f"data: found {type(data).__name__}, expected an iterable of batches (X, y).")
        if isinstance(data, Tensor | Mapping):
            raise TypeError(f"data: found a {type(data).__name__}, expected an iterable of batches (X, y): [(X, y)].")
        one_shot = False
        if not isinstance(data, Sequence):
            with random_state_kept():  # a DataLoader draws a seed for its workers
                one_shot = iter(data) is data
        if one_shot:
            raise ValueError(
                f"data: found a one-shot iterator ({type(data).__name__}), expected something that can be read again: "
                "pass a list or a DataLoader, for example list(data)."
            )
        return data

    # ---- data ----------------------------------------------------------------
    def batches(self, data: Iterable[tuple[Any, Any]] | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield the batches on the parameters' device, checked."""
        count = 0
        bar = tqdm(self.data if data is None else data, disable=not self.progressbar, desc="data", unit="batch")
        for batch in bar:
            if not isinstance(batch, Sequence) or len(batch) != 2:
                found = (
                    f"{type(batch).__name__} of length {len(batch)}"
                    if isinstance(batch, Sequence)
                    else type(batch).__name__
                )
                raise ValueError(f"Batch {count}: found a {found}, expected a pair (X, y).")
            X, y = (_to_device(part, self.device) for part in batch)
            _refuse_nonfinite(X, f"X of batch {count}")
            _refuse_nonfinite(y, f"y of batch {count}")
            yield X, y
            count += 1
        if not count:
            raise ValueError("data: found no batches, expected at least one (X, y).")

    def batch_size(self, X: Any, shape: Sequence[int]) -> int | None:
        """Number of data in a batch with a prediction of ``shape``; ``None`` where input and prediction do not agree on it."""
        rows = shape[0]
        if self.batch_size_fn is not None:
            n = int(self.batch_size_fn(X))
            if n < 1 or rows % n:
                raise ValueError(
                    f"batch_size_fn: found {n}, but the prediction has shape {tuple(shape)}; expected a divisor of "
                    f"its first axis, {rows}."
                )
            return n
        first = next(_tensors(X), None)
        return int(rows) if first is None or first.ndim == 0 or first.shape[0] == rows else None

    def check_deterministic(self) -> None:
        """Read the first batch twice and predict twice.

        Raises:
            ValueError: If the batches or the predictions differ.
        """
        with random_state_kept(self.device):
            first, second = (next(self.batches()) for _ in range(2))
        for (what, a), (_, b) in zip(_named_parts(first), _named_parts(second), strict=True):
            if len(a) != len(b) or any(s.shape != t.shape or not torch.equal(s, t) for s, t in zip(a, b, strict=True)):
                raise ValueError(
                    f"{what} of the first batch differs between two readings; turn shuffling and augmentation off."
                )
        with random_state_kept(self.device), self.leaves() as leaves, torch.no_grad():
            a, b = (self.loss.prepare(self.predict(leaves, first[0])) for _ in range(2))
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
            raise ValueError("Two predictions on the first batch differ; call model.eval().")

    def check_counts(self, num_data: int, loss_terms: int) -> None:
        """Raise if the data hold other numbers of data or loss terms than were given."""
        if self.num_data is not None and self.num_data != num_data:
            raise ValueError(
                f"num_data: found {self.num_data!r}, but the data hold {num_data}; leave it out or correct it."
            )
        terms = self.num_per_example_loss_terms
        if terms is not None and terms * num_data != loss_terms:
            raise ValueError(
                f"num_per_example_loss_terms: found {terms!r}, but the data hold {loss_terms} loss terms for "
                f"{num_data} data; leave it out or correct it."
            )

    # ---- model ---------------------------------------------------------------
    @contextmanager
    def leaves(self, again: dict[str, Tensor] | None = None) -> Iterator[dict[str, Tensor]]:
        """Swap fresh leaves into the model, for forward *and* backward passes; leave everything as it was.

        Leaves of an earlier call may be swapped in ``again``: their graph may recompute what checkpoints forgot.

        Yields a dictionary of parameters that share memory with ``params`` but nothing else: no hooks, no ``.grad``.
        Buffers are swapped for copies. The global random state is the caller's to keep (:func:`random_state_kept`).
        """
        with torch.inference_mode(False), torch.enable_grad():
            # Casting a value (never needed by the usual caller) must not become part of the graph.
            leaves: dict[str, Tensor] = again or {
                n: nn.Parameter(plain(p.detach()), requires_grad=True) for n, p in self.params.items()
            }
            with eager(), swapped(self.model, self.params, leaves):
                yield leaves

    def predict(self, leaves: dict[str, Tensor], X: Any) -> Any:
        """Call the model at ``leaves``; refuse one that draws random numbers, unless that is allowed."""
        before = torch_random_state(self.device)
        prediction = self._call(leaves, X)
        if not self.allow_train_mode and not all(map(torch.equal, before, torch_random_state(self.device))):
            raise ValueError(
                "The model draws random numbers (an active dropout, noise, sampling), so predictions depend on chance; call "
                "model.eval(), or pass allow_train_mode=True."
            )
        return prediction

    def _call(self, leaves: dict[str, Tensor], X: Any) -> Any:
        args, keywords = self.arguments(X)
        return self.model(*args, **keywords) if isinstance(self.model, nn.Module) else self.model(leaves, X)

    def arguments(self, X: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return how a module takes ``X``: positional and keyword arguments."""
        return ((), dict(X)) if isinstance(X, Mapping) and not self._takes_mappings else ((X,), {})


# ---- batches ------------------------------------------------------------------------
def _to_device(x: Any, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        with torch.inference_mode(False):
            return plain(x.to(device))
    if isinstance(x, Mapping):
        moved = {k: _to_device(v, device) for k, v in x.items()}
        if type(x) is dict or not isinstance(x, MutableMapping):
            return moved
        same_type = copy.copy(x)  # models may rely on more than the mapping interface
        inner = getattr(same_type, "__dict__", {})  # a shallow copy may still write into the user's batch
        inner.update({k: copy.copy(v) for k, v in inner.items() if isinstance(v, MutableMapping)})
        same_type.update(moved)
        return same_type
    if isinstance(x, list | tuple) and not hasattr(x, "to"):
        parts = [_to_device(v, device) for v in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x.to(device) if hasattr(x, "to") else x


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for v in x.values():
            yield from _tensors(v)
    elif isinstance(x, list | tuple):
        for v in x:
            yield from _tensors(v)


def _named_parts(batch: tuple[Any, Any]) -> Iterator[tuple[str, list[Tensor]]]:
    for what, part in zip(("X", "y"), batch, strict=True):
        yield what, list(_tensors(part))


def _refuse_nonfinite(x: Any, what: str) -> None:
    for t in _tensors(x):
        # The sum of finite numbers is rarely infinite: one cheap pass, and a second look where it is.
        if t.is_floating_point() and not torch.isfinite(t.sum()) and not torch.isfinite(t).all():
            raise ValueError(f"{what}: found NaN or infinite values, expected finite data.")


def _takes_one_argument(model: Model) -> bool:
    """Whether a mapping goes into a model whole, as its only argument."""
    if not isinstance(model, nn.Module):
        return True
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) == 1 and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def _refuse_train_mode(model: nn.Module) -> None:
    for name, module in model.named_modules():
        inside = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
        drops = inside or (isinstance(module, _DROPOUTS) and module.p > 0)
        if module.training and (drops or isinstance(module, _BATCH_NORMS)):
            raise ValueError(
                f"Module {name!r} ({type(module).__name__}) is in train mode, so predictions depend on "
                f"{'chance' if drops else 'the other data of the batch'}; call model.eval(), or pass allow_train_mode=True."
            )
