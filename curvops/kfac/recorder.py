"""Observe, at the level of operations, every use that a forward pass makes of tracked parameters.

A :class:`Recorder` is a ``TorchFunctionMode``: it recognises parameters by identity, whichever module or function uses
them, follows views and casts, and hands each use to the rule of its operation. What it cannot see (custom
``autograd.Function``, functorch transforms, reentrant checkpoints) is found afterwards: :meth:`Recorder.check` walks the
autograd graph and insists that every path into a parameter leads through a recorded use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from curvops.kfac._autograd import graph_edges, is_functorch, node_number, result_nodes, sequence_number, stable_edge
from curvops.kfac.rules import rule_for, supported
from curvops.kfac.rules._base import Form

#: Functions whose result holds the entries of their first argument in another arrangement.
_VIEWS = frozenset(
    "t T mT transpose swapaxes swapdims movedim moveaxis permute view view_as reshape reshape_as flatten unflatten ravel "
    "squeeze unsqueeze contiguous chunk split split_with_sizes tensor_split unbind narrow select __getitem__".split()
)
#: Functions whose result holds the entries of their first argument in the same arrangement.
_CASTS = frozenset("to type float double half bfloat16 type_as clone cpu cuda alias view_as_same".split())
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


@dataclass(frozen=True, eq=False)
class Operand:
    """A tracked parameter, or a rearranged part of one, as an operand of an operation.

    Attributes:
        name: Name of the parameter.
        tensor: The very tensor; held so that its identity stays taken.
        shape: Shape of the parameter.
        entries: Flat indices of the parameter's entries, shaped like ``tensor``; ``None`` for the parameter itself.
        version: Of the tensor when it was recorded.
    """

    name: str
    tensor: Tensor
    shape: torch.Size
    entries: Tensor | None = None
    version: int = 0

    @property
    def modified(self) -> bool:
        """Whether it no longer holds the parameter's entries (a leaf stays a leaf, whatever its values)."""
        return not self.tensor.is_leaf and self.tensor._version != self.version


@dataclass(eq=False)
class Use:
    """One operation of the forward pass that consumes tracked parameters.

    Attributes:
        function: Name of the operation.
        form: Its canonical form.
        x: Its input; ``version`` tells whether it was modified afterwards.
        edge: Where the gradient of its output, of shape ``shape``, arrives.
        weight, bias: The tracked operands; ``None`` where an operand is absent or not tracked.
    """

    function: str
    form: Form
    x: Tensor
    edge: GradientEdge
    shape: torch.Size
    weight: Operand | None
    bias: Operand | None
    version: int = -1

    def __post_init__(self) -> None:
        if self.version < 0:
            self.version = self.x._version

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tracked parameters it consumes."""
        return tuple(o.name for o in (self.weight, self.bias) if o is not None)

    def input(self) -> Tensor:
        """Return the input as it was when the operation ran."""
        if self.x._version != self.version:
            raise ValueError(
                f"The input of {self.function} with parameters {list(self.names)} was modified in place after its use; "
                "its value is lost. Make that operation out of place."
            )
        return self.x.detach()


@dataclass(frozen=True)
class Unsupported:
    """An operation on a tracked parameter that no rule covers; ``interval`` or ``nodes`` find it in the graph."""

    name: str
    function: str
    reason: str
    interval: tuple[int, int] = (0, 0)
    nodes: frozenset[Any] = frozenset()


class Recorder(TorchFunctionMode):
    """Record the uses of parameters while it is entered.

    Args:
        tracked: The parameters to watch, by name, as the very objects the model will use.
        replaced: The tensors that they stand for, which the model must not use instead.
        allow_train_mode: Accept dropout and batch statistics.

    Attributes:
        uses: What was seen, in order of the forward pass.
        unsupported: Operations on tracked parameters without a rule.
    """

    def __init__(
        self,
        tracked: Mapping[str, Tensor],
        replaced: Mapping[str, Tensor] | None = None,
        *,
        allow_train_mode: bool = False,
    ) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.unsupported: list[Unsupported] = []
        self._allow_train_mode = allow_train_mode
        self._leaves, self._replaced = dict(tracked), dict(replaced or {})
        self._operands = {id(t): Operand(n, t, t.shape) for n, t in tracked.items()}
        self._intervals: dict[str, list[tuple[int, int]]] = {n: [] for n in tracked}
        self._without_gradient: dict[str, str] = {}
        self._results: set[Any] = set()  # the nodes of what noted operations returned

    # ---- during the forward pass -------------------------------------------------
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self._check_chance(func, args, kwargs)
        if func is torch.autograd.grad:
            return self._derivative(args, kwargs)
        found = [self._operands[id(t)] for t in _flat(args, kwargs) if id(t) in self._operands]
        if not found:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # Its Python body runs bit-identically, and its projections are seen, once it stops deferring to modes.
            with patch.object(F, "has_torch_function", lambda _: False), self:
                return func(*args, **kwargs)
        start = sequence_number()
        out = func(*args, **kwargs)
        results = [t for t in _flat((out,), {}) if t.is_floating_point() or t.is_complex()]
        if results:
            self._results |= result_nodes(results)
            self._note(_name(func), func, args, kwargs, found, out, results, (start, sequence_number()))
        return out

    def _note(self, name, func, args, kwargs, found, out, results, interval) -> None:
        names = list(dict.fromkeys(operand.name for operand in found))
        if any(is_functorch(t) for t in (*results, *_flat(args, kwargs))):
            reason = "it runs inside a functorch transform (vmap, grad, jvp, ...), which hides its inputs"
            self._refuse(names, name, reason, interval)
        elif not any(t.requires_grad for t in results):
            for n in names:
                self._without_gradient.setdefault(n, name)
        elif any(operand.modified for operand in found):
            self._refuse(names, name, "it was modified in place before", interval)
        elif name in _CASTS | _VIEWS and len(found) == 1 and next(_flat(args, kwargs)) is found[0].tensor:
            self._derive(name, func, args, kwargs, found[0], out)
        elif rule := rule_for(func):
            self._use(name, rule, args, kwargs, found, out, interval)
        else:
            self._refuse(names, name, "no rule covers it", interval)
        for n in names:
            self._intervals[n].append(interval)

    def _derivative(self, args: tuple, kwargs: dict) -> Any:
        """Run ``torch.autograd.grad``: what depends on its result uses parameters in ways that no rule knows."""
        start = sequence_number()
        out = torch.autograd.grad(*args, **kwargs)
        results = [t for t in _flat((out,), {}) if t.grad_fn is not None]
        owners, interval = {id(t): n for n, t in self._leaves.items()}, (start, sequence_number())
        variables = {id(getattr(target, "variable", None)) for t in results for _, target in graph_edges(t)}
        reason = "the prediction depends on a derivative of operations with it, and rules know only their results"
        self._results |= (nodes := result_nodes(results))
        for name in sorted(owners[v] for v in variables & owners.keys()):
            self.unsupported.append(Unsupported(name, "autograd.grad", reason, interval, frozenset(nodes)))
            self._intervals[name].append(interval)
        return out

    def _derive(self, name: str, func: Any, args: tuple, kwargs: dict, source: Operand, out: Any) -> None:
        entries = source.entries
        if name not in _CASTS:
            if entries is None:
                entries = torch.arange(source.tensor.numel(), device=source.tensor.device).view(source.tensor.shape)
            swapped = {k: entries if v is source.tensor else v for k, v in kwargs.items()}
            entries = func(*(entries if a is source.tensor else a for a in args), **swapped)
        for tensor, part in zip(
            _flat((out,), {}), [entries] if entries is None else _flat((entries,), {}), strict=True
        ):
            if tensor is not source.tensor:  # contiguous() and friends may return their argument
                self._operands[id(tensor)] = Operand(source.name, tensor, source.shape, part, tensor._version)

    def _use(self, name, rule, args, kwargs, found, out, interval) -> None:
        try:
            op = rule(*args, tracked=lambda t: id(t) in self._operands, **kwargs)
        except NotImplementedError as error:
            self._refuse([o.name for o in found], name, str(error), interval)
            return
        weight, bias = (None if t is None else self._operands.get(id(t)) for t in (op.weight, op.bias))
        if op.x.layout is not torch.strided or op.x.is_nested:
            self._refuse([o.name for o in found], name, "its input is sparse or nested; supported: dense", interval)
            return
        consumed = [o for o in (weight, bias) if o is not None]
        others = [o.name for o in found if all(o is not c for c in consumed)]
        if others:
            self._refuse(others, name, "it is used as the input of the operation, not as its weight or bias", interval)
        if consumed:
            self.uses.append(Use(name, op.form, op.x, stable_edge(out), out.shape, weight, bias))

    def _refuse(self, names: Iterable[str], function: str, reason: str, interval: tuple[int, int]) -> None:
        self.unsupported += [Unsupported(n, function, reason, interval) for n in dict.fromkeys(names)]

    def _check_chance(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Refuse dropout and batch statistics wherever they come from: they make a prediction depend on more than its datum."""
        if self._allow_train_mode:
            return
        if func in _DROPOUTS:
            p, training = (*args[1:3], *(kwargs[k] for k in ("p", "training") if k in kwargs))[:2]
            if training and p > 0:
                raise ValueError(
                    f"{func.__name__} is active (p={p}); call model.eval(), or pass allow_train_mode=True."
                )
        elif func in (F.batch_norm, torch.batch_norm) and (args[5] if len(args) > 5 else kwargs.get("training", False)):
            raise ValueError(
                "batch_norm uses the statistics of the batch, so predictions depend on the other data; call model.eval() "
                "(with running statistics), or pass allow_train_mode=True."
            )

    # ---- after the forward pass ----------------------------------------------------
    def check(self, output: Tensor) -> frozenset[str]:
        """Prove on the autograd graph that every path from ``output`` into a parameter leads through a noted operation.

        Uses and unsupported operations that ``output`` does not depend on are dropped.

        Returns:
            The names of the parameters that ``output`` depends on.

        Raises:
            NotImplementedError: If a use escaped, naming the parameter and the autograd node.
        """
        owners, replaced = ({id(t): n for n, t in ts.items()} for ts in (self._leaves, self._replaced))
        derived = {o.tensor.grad_fn: o.name for o in self._operands.values() if o.tensor.grad_fn is not None}
        edges = graph_edges(output)
        parents: dict[Any, list[Any]] = {output.grad_fn: [None]}
        for source, target in edges:
            parents.setdefault(target, []).append(source)
        numbers: dict[str, list[int]] = {}
        for source, target in edges:
            if "CheckpointFunction" in source.name():
                raise NotImplementedError(_REENTRANT.format(node=source.name()))
            variable = id(getattr(target, "variable", None))
            if variable in replaced:
                raise NotImplementedError(_STALE.format(name=replaced[variable], node=source.name()))
            name = owners.get(variable) or derived.get(target)
            if name is None:
                continue
            self._check_noted(name, source, parents)
            numbers.setdefault(name, []).append(node_number(source))
        if (name := owners.get(id(output)) or derived.get(output.grad_fn)) is not None:
            raise NotImplementedError(_ESCAPED.format(name=name, node=_title(None)))
        for name, function in self._without_gradient.items():
            if name not in numbers:
                raise NotImplementedError(_NO_GRADIENT.format(name=name, function=function))
        nodes = {output.grad_fn, *(source for source, _ in edges)}
        self.uses = [u for u in self.uses if u.edge.node in nodes]
        self.unsupported = [
            u
            for u in self.unsupported
            if u.nodes & nodes or any(u.interval[0] <= n < u.interval[1] for n in numbers.get(u.name, ()))
        ]
        return frozenset(numbers)

    def _check_noted(self, name: str, node: Any, parents: Mapping[Any, list[Any]]) -> None:
        """Raise unless noted operations made ``node`` and whatever leads to it without passing through their results."""
        opaque = [u.interval for u in self.unsupported if u.name == name]
        stack, seen = [node], {node}
        while stack:
            node = stack.pop()
            number = -1 if node is None else node_number(node)
            if not any(start <= number < stop for start, stop in self._intervals[name]):
                raise NotImplementedError(_ESCAPED.format(name=name, node=_title(node)))
            if node not in self._results and not any(start <= number < stop for start, stop in opaque):
                # Derivatives reach into an operation: what it saved may depend on the parameter.
                new = [p for p in parents.get(node, ()) if p not in seen]
                stack += new
                seen.update(new)


_REENTRANT = (
    "A reentrant checkpoint ({node}) hides what happens inside it from every observer; use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)
_NO_GRADIENT = (
    "Parameter {name!r} is used by {function} without gradient (no_grad, detach, .data, or a reentrant checkpoint) and "
    "nowhere with one, so its curvature is not what the model computes. Use checkpoint(..., use_reentrant=False), or leave "
    "the parameter out of params."
)
_ESCAPED = (
    "Parameter {name!r} is used by the autograd node {node}, which no recorded operation explains: a custom "
    "autograd.Function, a functorch transform, a scripted function, forward-mode or second derivatives, or a view taken before "
    "the forward pass. Its curvature would be wrong. Use "
    "torch operations on the parameter, or leave it out of params."
)
_STALE = (
    "Parameter {name!r} is used by the autograd node {node} through a reference that was taken before the forward pass (a "
    "list or cache of parameters or of views of them, or a closure), so nothing else can take its place. Read parameters "
    "from the module, or from the params argument, during the forward pass."
)


def unsupported_message(found: Unsupported) -> str:
    """Say what is not supported, what is, and how to go on."""
    return (
        f"Parameter {found.name!r} is used by {found.function}: {found.reason}. Supported operations: "
        f"{', '.join(supported())}. Register a rule with curvops.kfac.rules.register, leave the parameter out of params, or "
        "choose unsupported='exact', 'diagonal' or 'zero'."
    )


def _flat(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from _flat(a, {})


def _title(node: Any) -> str:
    return "of the prediction itself" if node is None else node.name()


def _name(func: Any) -> str:
    """Name a function; a property is named by its attribute."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name
