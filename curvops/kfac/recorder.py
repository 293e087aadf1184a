"""Observe, at the level of operations, every use that a forward pass makes of tracked parameters.

A :class:`Recorder` is a ``TorchFunctionMode``: it recognises parameters by identity, whichever module or function uses
them, follows views and casts, and hands each use to the rule of its operation. What it cannot see (custom
``autograd.Function``, functorch transforms, reentrant checkpoints) is found afterwards: :meth:`Recorder.check` walks the
autograd graph and insists that every path into a parameter leads through a recorded use.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvops.kfac._autograd import graph_edges, is_functorch, node_number, result_nodes, sequence_number, stable_edge
from curvops.kfac.rules import rule_for
from curvops.kfac.rules._base import Rule
from curvops.kfac.uses import Operand, Unsupported, Use

#: Functions whose result holds the entries of their first argument in another arrangement.
_VIEWS = frozenset(
    "t T mT transpose swapaxes swapdims movedim moveaxis permute view view_as reshape reshape_as flatten unflatten ravel "
    "squeeze unsqueeze contiguous chunk split split_with_sizes tensor_split unbind narrow select __getitem__".split()
)
#: Functions whose result holds the entries of their first argument in the same arrangement.
_CASTS = frozenset("to type float double half bfloat16 type_as clone cpu cuda alias".split())
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


class Escaped(NotImplementedError):
    """A parameter is used in a way that was not seen; ``name`` is its name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of an operation on tracked parameters.

    Attributes:
        func, args, kwargs, out: The call and what it returned.
        found: The tracked operands among the arguments.
        interval: Sequence numbers of the autograd nodes that it made.
    """

    func: Any
    args: tuple
    kwargs: dict
    out: Any
    found: list[Operand]
    interval: tuple[int, int]

    @property
    def name(self) -> str:
        """Name of the function; a property is named by its attribute."""
        name = getattr(self.func, "__name__", str(self.func))
        return getattr(self.func.__self__, "__name__", name) if name == "__get__" else name

    @property
    def results(self) -> list[Tensor]:
        """What it returned, as far as it can carry gradients."""
        return [t for t in _flat((self.out,), {}) if t.is_floating_point() or t.is_complex()]

    @property
    def on_first(self) -> bool:
        """Whether its first tensor is the only tracked operand."""
        return len(self.found) == 1 and next(_flat(self.args, self.kwargs)) is self.found[0].tensor


class Recorder(TorchFunctionMode):
    """Record the uses of parameters while it is entered.

    Args:
        tracked: The parameters to watch, by name, as the very objects the model will use.
        replaced: The tensors that they stand for, which the model must not use instead.
        allow_train_mode: Accept dropout and batch statistics.
        on_use: Told of every use as soon as it is seen.
        on_checkpoint: Told of the autograd nodes of reentrant checkpoints, which hide what happens inside them; by default
            they are refused.

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
        on_use: Callable[[Use], None] | None = None,
        on_checkpoint: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_use, self._on_checkpoint = on_use, on_checkpoint
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
        call = _Call(func, args, kwargs, out, found, (start, sequence_number()))
        if results := call.results:
            self._results |= result_nodes(results)
            self._note(call, results)
        return out

    def _note(self, call: _Call, results: list[Tensor]) -> None:
        names = dict.fromkeys(operand.name for operand in call.found)
        if any(is_functorch(t) for t in (*results, *_flat(call.args, call.kwargs))):
            self._refuse(call, "it runs inside a functorch transform (vmap, grad, jvp, ...), which hides its inputs")
        elif not any(t.requires_grad for t in results):
            for name in names:
                self._without_gradient.setdefault(name, call.name)
        elif any(operand.modified for operand in call.found):
            self._refuse(call, "it was modified in place before")
        elif call.name in _CASTS | _VIEWS and call.on_first:
            self._derive(call, call.found[0])
        elif rule := rule_for(call.func):
            self._use(call, rule)
        else:
            self._refuse(call, "no rule covers it")
        for name in names:
            self._intervals[name].append(call.interval)

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

    def _derive(self, call: _Call, source: Operand) -> None:
        """Follow a parameter through a view or a cast."""
        entries = source.entries
        if call.name not in _CASTS:
            if entries is None:
                entries = torch.arange(source.tensor.numel(), device=source.tensor.device).view(source.tensor.shape)
            swapped = {k: entries if v is source.tensor else v for k, v in call.kwargs.items()}
            entries = call.func(*(entries if a is source.tensor else a for a in call.args), **swapped)
        parts = [None] if entries is None else _flat((entries,), {})
        for tensor, part in zip(_flat((call.out,), {}), parts, strict=True):
            if tensor is not source.tensor:  # contiguous() and friends may return their argument
                self._operands[id(tensor)] = Operand(source.name, tensor, source.shape, part, tensor._version)

    def _use(self, call: _Call, rule: Rule) -> None:
        try:
            op = rule(*call.args, tracked=lambda t: id(t) in self._operands, **call.kwargs)
        except NotImplementedError as error:
            self._refuse(call, str(error))
            return
        weight, bias = (None if t is None else self._operands.get(id(t)) for t in (op.weight, op.bias))
        if op.x.layout is not torch.strided or op.x.is_nested:
            self._refuse(call, "its input is sparse or nested; supported: dense")
            return
        consumed = [o for o in (weight, bias) if o is not None]
        others = [o for o in call.found if all(o is not c for c in consumed)]
        if others:
            self._refuse(call, "it is used as the input of the operation, not as its weight or bias", others)
        if consumed:
            edge = stable_edge(call.out)
            self.uses.append(Use(call.name, op.form, op.x, edge, call.out.shape, weight, bias))
            if self._on_use is not None:
                self._on_use(self.uses[-1])

    def _refuse(self, call: _Call, reason: str, operands: Iterable[Operand] | None = None) -> None:
        names = dict.fromkeys(o.name for o in (call.found if operands is None else operands))
        self.unsupported += [Unsupported(n, call.name, reason, call.interval) for n in names]

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
    def check(self, output: Tensor, besides: Container[str] = ()) -> frozenset[str]:
        """Prove on the autograd graph that every path from ``output`` into a parameter leads through a noted operation.

        Uses and unsupported operations that ``output`` does not depend on are dropped.

        Args:
            output: Attached to the graph.
            besides: Parameters that need no proof.

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
        hidden = [node for node in {source: None for source, _ in edges} if "CheckpointFunction" in node.name()]
        if hidden and self._on_checkpoint is None:
            raise NotImplementedError(_REENTRANT.format(node=hidden[0].name()))
        for source, target in edges:
            variable = id(getattr(target, "variable", None))
            if variable in replaced:
                raise Escaped(replaced[variable], _STALE.format(name=replaced[variable], node=source.name()))
            name = owners.get(variable) or derived.get(target)
            if name is None or name in besides:
                continue
            self._check_noted(name, source, parents)
            numbers.setdefault(name, []).append(node_number(source))
        name = owners.get(id(output)) or derived.get(output.grad_fn)
        if name is not None and name not in besides:
            raise Escaped(name, _ESCAPED.format(name=name, node=_title(None)))
        for name, function in self._without_gradient.items():
            if name not in numbers and name not in besides and not hidden:
                raise Escaped(name, _NO_GRADIENT.format(name=name, function=function))
        for node in hidden:
            self._on_checkpoint(node)
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
                raise Escaped(name, _ESCAPED.format(name=name, node=_title(node)))
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


def _flat(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from _flat(a, {})


def _title(node: Any) -> str:
    return "of the prediction itself" if node is None else node.name()
