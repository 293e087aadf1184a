"""The empirical risk: a model, a loss, parameters and data, put together once for every operator."""

from __future__ import annotations

import copy
import difflib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvops.losses import output_loss

Params = Mapping[str, Tensor] | Sequence[Tensor] | None
Model = nn.Module | Callable[[dict[str, Tensor], Any], Any]

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
        self.dtype, self.device = _common(self.params)
        self.num_data, self.num_per_example_loss_terms = num_data, num_per_example_loss_terms
        self.batch_size_fn, self.progressbar = batch_size_fn, progressbar
        self.allow_train_mode = allow_train_mode
        self.data = self.checked_data(data)
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

    def batch_size(self, X: Any, output: Tensor) -> int | None:
        """Number of data in a batch; ``None`` where the input and the output do not agree on it."""
        if self.batch_size_fn is not None:
            n = int(self.batch_size_fn(X))
            if n < 1 or output.shape[0] % n:
                raise ValueError(
                    f"batch_size_fn: found {n}, but the prediction has shape {tuple(output.shape)}; expected a divisor of "
                    f"its first axis, {output.shape[0]}."
                )
            return n
        first = next(_tensors(X), None)
        agree = first is None or first.ndim == 0 or first.shape[0] == output.shape[0]
        return int(output.shape[0]) if agree else None

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

    # ---- model ---------------------------------------------------------------
    @contextmanager
    def leaves(self) -> Iterator[dict[str, Tensor]]:
        """Swap fresh leaves into the model, for forward *and* backward passes; leave everything as it was.

        Yields a dictionary of parameters that share memory with ``params`` but nothing else: no hooks, no ``.grad``.
        Buffers are swapped for copies. The global random state is the caller's to keep (:func:`random_state_kept`).
        """
        with torch.inference_mode(False), torch.enable_grad():
            # Casting a value (never needed by the usual caller) must not become part of the graph.
            leaves: dict[str, Tensor] = {
                n: nn.Parameter(_plain(p.detach()), requires_grad=True) for n, p in self.params.items()
            }
            with _eager(), _swapped(self.model, self.params, leaves):
                yield leaves

    def predict(self, leaves: dict[str, Tensor], X: Any) -> Any:
        """Call the model at ``leaves``; refuse one that draws random numbers, unless that is allowed."""
        before = _torch_random_state(self.device)
        prediction = self._call(leaves, X)
        if not self.allow_train_mode and not all(map(torch.equal, before, _torch_random_state(self.device))):
            raise ValueError(
                "The model draws random numbers (an active dropout, noise, sampling), so predictions depend on chance; call "
                "model.eval(), or pass allow_train_mode=True."
            )
        return prediction

    def _call(self, leaves: dict[str, Tensor], X: Any) -> Any:
        if not isinstance(self.model, nn.Module):
            return self.model(leaves, X)
        if isinstance(X, Mapping) and not _takes_one_argument(self.model):
            return self.model(**X)
        return self.model(X)


# ---- parameters ------------------------------------------------------------------
def named_params(model: Model, params: Params) -> dict[str, Tensor]:
    """Return the parameters as an ordered dictionary from name to tensor."""
    result: dict[str, Tensor]
    if not isinstance(model, nn.Module):
        if not callable(model) or isinstance(model, type):
            raise TypeError(f"model: found {model!r}, expected a module or a callable (params, x) -> prediction.")
        if not isinstance(params, Mapping):
            raise TypeError(
                f"params: found {type(params).__name__}; a callable model needs a dictionary name -> tensor."
            )
        result = dict(params)
    elif params is None:
        result = {n: p for n, p in model.named_parameters() if p.requires_grad}
    elif isinstance(params, Mapping):
        result = dict(params)
        _check_names(model, result)
    else:
        result = _names_of(model, params)
    if not result:
        raise ValueError(
            "params: found none (with params=None, none requires a gradient); expected at least one parameter."
        )
    for name, p in result.items():
        if not isinstance(p, Tensor):
            raise TypeError(f"params[{name!r}]: found {type(p).__name__}, expected a tensor.")
    return result


def _names_of(model: nn.Module, params: Any) -> dict[str, Tensor]:
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"params: found {type(params).__name__}, expected a dictionary, a list of parameters, or None.")
    names = {id(p): n for n, p in model.named_parameters()}
    result: dict[str, Tensor] = {}
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            raise TypeError(
                f"params[{i}]: found {p!r}, expected a parameter of the model, or a dictionary name -> tensor."
            )
        if id(p) not in names:
            raise ValueError(
                f"params[{i}]: found a tensor that is no parameter of the model; to use other values, pass a dictionary "
                "from parameter name to tensor."
            )
        if names[id(p)] in result:
            raise ValueError(f"params[{i}]: found {names[id(p)]!r} a second time; expected each parameter once.")
        result[names[id(p)]] = p
    return result


def _check_names(model: nn.Module, params: dict[str, Tensor]) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, p in params.items():
        if name not in own:
            close = difflib.get_close_matches(str(name), own, n=3, cutoff=0.3)
            raise ValueError(
                f"params: the model has no parameter {name!r}" + (f"; close names: {close}." if close else ".")
            )
        if isinstance(p, Tensor) and p.shape != own[name].shape:
            raise ValueError(f"params[{name!r}]: found shape {tuple(p.shape)}, expected {tuple(own[name].shape)}.")
        other = first.setdefault(id(own[name]), name)
        if other != name:
            raise ValueError(
                f"params: {other!r} and {name!r} are one tied parameter of the model; pass it under one name."
            )


def _common(params: dict[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    for attribute in ("dtype", "device"):
        kinds: dict[Any, str] = {}
        for name, p in params.items():
            kinds.setdefault(getattr(p, attribute), name)
        if len(kinds) > 1:
            listed = ", ".join(f"{name!r} has {kind}" for kind, name in kinds.items())
            error = TypeError if attribute == "dtype" else ValueError
            raise error(
                f"params: found several {attribute}s ({listed}), expected one; select or convert the parameters."
            )
    p = next(iter(params.values()))
    if p.device.type == "meta":
        raise ValueError("params: found the meta device, which holds no values; load or initialise the parameters.")
    if not p.is_floating_point():
        raise TypeError(f"params: found dtype {p.dtype}, expected a real floating point dtype.")
    return p.dtype, p.device


# ---- swapping ---------------------------------------------------------------------
def _slots(model: nn.Module, kind: str) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in model.modules():
        store = getattr(module, kind)
        for key, t in store.items():
            if t is not None:
                yield store, key, t


@contextmanager
def _swapped(model: Model, params: dict[str, Tensor], leaves: dict[str, Tensor]) -> Iterator[None]:
    if not isinstance(model, nn.Module):
        yield
        return
    own = dict(model.named_parameters(remove_duplicate=False))
    new = {id(own[name]): leaves[name] for name in params}
    parameters = [slot for slot in _slots(model, "_parameters") if id(slot[2]) in new]
    buffers = list(_slots(model, "_buffers"))
    copies = {id(b): b.clone() for _, _, b in buffers}
    attributes = [(m.__dict__, dict(m.__dict__)) for m in model.modules()]
    try:
        for store, key, t in parameters:
            store[key] = new[id(t)]
        for store, key, t in buffers:
            store[key] = copies[id(t)]
        _refresh_flat_weights(model)
        yield
    finally:
        for store, key, t in (*parameters, *buffers):
            store[key] = t
        for store, before in attributes:
            _restore_tensors(store, before)
        _refresh_flat_weights(model)


def _restore_tensors(store: dict[str, Any], before: dict[str, Any]) -> None:
    """Take back tensors that modules keep as plain attributes (weights made by hooks, caches): they hold our graph."""
    for key, value in list(store.items()):
        if isinstance(value, Tensor) and value is not before.get(key):
            store.pop(key)
    store.update((k, v) for k, v in before.items() if isinstance(v, Tensor))


def _refresh_flat_weights(model: nn.Module) -> None:
    """Recurrent modules keep a second list of their parameters."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.__dict__["_flat_weights"] = [getattr(module, n, None) for n in module._flat_weights_names]


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled models eagerly: their operations must be seen, and one pass does not pay for a compilation."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def random_state_kept(device: torch.device | None = None) -> Iterator[None]:
    """Put the global generators of Python, numpy and torch back, whatever data and models draw from them."""
    python, numpy, states = random.getstate(), np.random.get_state(), _torch_random_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, device)


def _torch_random_state(device: torch.device | None) -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state(device)] if device is not None and device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


# ---- batches ------------------------------------------------------------------------
def _plain(t: Tensor) -> Tensor:
    """Tensors made in inference mode cannot enter a graph."""
    return t.clone() if t.is_inference() else t


def _to_device(x: Any, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        with torch.inference_mode(False):
            return _plain(x.to(device))
    if isinstance(x, Mapping):
        moved = {k: _to_device(v, device) for k, v in x.items()}
        if type(x) is dict or not isinstance(x, MutableMapping):
            return moved
        same_type = copy.copy(x)  # models may rely on more than the mapping interface
        same_type.update(moved)
        return same_type
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return type(x)(_to_device(v, device) for v in x)
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


def _takes_one_argument(model: nn.Module) -> bool:
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
