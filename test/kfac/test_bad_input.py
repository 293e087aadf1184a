"""Bad input: what was found, what was expected and what to do is said, and everything stays as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kfac.photograph import state
from torch import Tensor, nn

from curvops import KFACLinearOperator, explain

D, NAN, INF = 4, float("nan"), float("inf")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, 3))


def batches(*sizes: int) -> list:
    return [(torch.randn(n, D), torch.randn(n, 3)) for n in sizes]


NET, DATA = net(), batches(4, 2)
W = {"w": torch.randn(3, D)}


@contextmanager
def refused(error: type[Exception], *words: str, models: tuple = ()) -> Iterator[None]:
    """Expect an error whose message holds all the words, and a state that is as before."""
    modules = [m for m in (NET, *models) if isinstance(m, nn.Module)]
    before = state(*modules)
    with pytest.raises(error) as info:
        yield
    assert type(info.value) is error
    text = str(info.value)
    missing = [w for w in words if not re.search(w, text)]
    assert not missing, f"{missing} not in: {text}"
    assert state(*modules) == before


def K(model: Any = NET, loss: Any = None, params: Any = None, data: Any = DATA, **options: Any) -> KFACLinearOperator:
    return KFACLinearOperator(model, nn.MSELoss() if loss is None else loss, params, data, **options)


def with_value(t: Tensor, value: float) -> Tensor:
    t = t.clone()
    t[1, 2] = value
    return t


# ---- data ----------------------------------------------------------------------------------------
NAN_X, INF_Y = with_value(DATA[0][0], NAN), with_value(DATA[0][1], INF)
FINITE = (ValueError, "finite data")
ONE_SHOT = (ValueError, r"one-shot iterator", r"list\(data\)")
PAIRS = (TypeError, r"expected an iterable of batches \(X, y\)")
DATA_CASES: dict[str, tuple] = {
    "generator": (lambda: ((X, y) for X, y in DATA), *ONE_SHOT, "generator"),
    "iterator": (lambda: iter(DATA), *ONE_SHOT),
    "map": (lambda: map(tuple, DATA), *ONE_SHOT, "map"),
    "function": (lambda: batches, *PAIRS, "function"),
    "tensor": (lambda: DATA[0][0], *PAIRS, "Tensor"),
    "mapping": (lambda: {"X": 1, "y": 2}, *PAIRS, "dict"),
    "none": (lambda: None, *PAIRS, "NoneType"),
    "empty": (list, ValueError, "found no batches", r"at least one \(X, y\)"),
    "empty batch": (lambda: batches(2, 0), ValueError, "Batch 1", r"\(shape \(0, 3\)\)", "leave empty batches out"),
    "one pair": (lambda: DATA[0], ValueError, "Batch 0", "found a Tensor", r"pair \(X, y\)"),
    "triples": (lambda: [(*DATA[0], 1)], ValueError, "Batch 0", "tuple of length 3", r"pair \(X, y\)"),
    "mappings": (lambda: [{"X": 1, "y": 2}], ValueError, "Batch 0", "found a dict", r"pair \(X, y\)"),
    "no target": (lambda: [(DATA[0][0], None)], TypeError, "target", "NoneType"),
    "target shape": (lambda: [(DATA[0][0], DATA[0][1][:, :2])], ValueError, r"\(4, 3\)", r"\(4, 2\)"),
    "NaN in X": (lambda: [DATA[1], (NAN_X, DATA[0][1])], *FINITE, "X of batch 1"),
    "inf in y": (lambda: [DATA[1], (DATA[0][0], INF_Y)], *FINITE, "y of batch 1"),
    "NaN inside": (lambda: [({"x": [NAN_X]}, DATA[0][1])], *FINITE, "X of batch 0"),
}


@pytest.mark.parametrize("name", DATA_CASES)
def test_bad_input_data(name: str) -> None:
    make, error, *words = DATA_CASES[name]
    data = make()
    with refused(error, *words):
        K(data=data)
    data, k = make(), K(fisher_type="type-2")
    before = k.to_dense()
    with refused(error, *words):
        k.update(data, 0.5)
    assert torch.equal(k.to_dense(), before)


NON_FINITE = {
    "input": (torch.full((2, D), 1e25), torch.zeros(2, 3)),
    "output": (torch.ones(2, D), torch.full((2, 3), 1e25)),
}


@pytest.mark.parametrize("factor", NON_FINITE)
def test_bad_input_factors_that_overflow_name_their_layer(factor: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(D, 3))
    for p in model.parameters():
        nn.init.zeros_(p)
    with refused(ValueError, r"'1\.weight'", f"{factor} factor", "NaN or infinite", "rescale", models=(model,)):
        K(model, data=[NON_FINITE[factor]], fisher_type="empirical")


def test_bad_input_predictions_that_are_not_finite() -> None:
    model = net()
    nn.init.constant_(model[2].bias, NAN)
    with refused(ValueError, "Batch 0", "prediction has NaN", models=()):
        K(model)


# ---- chance and other data ---------------------------------------------------------------------------
CHANCE = (ValueError, r"depend on chance|is active \(p=0\.5\)", r"model\.eval\(\)", "allow_train_mode=True")
BATCH = (ValueError, "the other data|the statistics of the batch", r"model\.eval\(\)", "allow_train_mode=True")


def attention(p: dict[str, Tensor], x: Tensor) -> Tensor:
    q = F.linear(x, p["w"]).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).squeeze(1)


TRAIN: dict[str, tuple] = {
    "BatchNorm": (nn.Sequential(nn.Linear(D, 3), nn.BatchNorm1d(3, affine=False)), *BATCH, r"'1' \(BatchNorm1d\)"),
    "no statistics": (nn.Sequential(nn.Linear(D, 3), nn.BatchNorm1d(3, 0.1, None, False, False)).eval(), *BATCH),
    "Dropout": (nn.Sequential(nn.Linear(D, 3), nn.Dropout(0.5)), *CHANCE, r"'1' \(Dropout\)"),
    "RReLU": (nn.Sequential(nn.Linear(D, 3), nn.RReLU()), *CHANCE),
    "F.dropout": (lambda p, x: F.dropout(F.linear(x, p["w"])), *CHANCE, "dropout is active"),
    "keywords": (lambda p, x: F.dropout(input=F.linear(x, p["w"]), p=0.5, training=True), *CHANCE),
    "of a parameter": (lambda p, x: F.linear(x, F.dropout(p["w"], 0.5)), *CHANCE),
    "alpha": (lambda p, x: F.alpha_dropout(F.linear(x, p["w"]), 0.5, training=True), *CHANCE, "alpha_dropout"),
    "torch.dropout": (lambda p, x: torch.dropout(F.linear(x, p["w"]), 0.5, True), *CHANCE),
    "attention": (attention, *CHANCE),
    "noise": (lambda p, x: F.linear(x + torch.randn_like(x), p["w"]), *CHANCE),
    "F.batch_norm": (lambda p, x: F.batch_norm(F.linear(x, p["w"]), None, None, training=True), *BATCH),
    "torch.batch_norm": (
        lambda p, x: torch.batch_norm(F.linear(x, p["w"]), None, None, None, None, True, 0.1, 1e-5, False),
        *BATCH,
    ),
}


@pytest.mark.parametrize("name", TRAIN)
def test_bad_input_train_mode_is_refused_unless_allowed(name: str) -> None:
    model, error, *words = TRAIN[name]
    params = None if isinstance(model, nn.Module) else W
    with refused(error, *words, models=(model,)):
        K(model, params=params)
    before = state(NET)
    K(model, params=params, allow_train_mode=True, unsupported="exact")
    assert state(NET) == before


QUIET = {
    "F.dropout off": lambda p, x: F.dropout(F.linear(x, p["w"]), 0.5, False),
    "p = 0": lambda p, x: F.dropout(F.linear(x, p["w"]), 0.0, True),
    "statistics given": lambda p, x: F.batch_norm(F.linear(x, p["w"]), torch.zeros(3), torch.ones(3)),
}


@pytest.mark.parametrize("name", QUIET)
def test_bad_input_quiet_functions_are_fine(name: str) -> None:
    assert K(QUIET[name], params=W, fisher_type="type-2").trace() > 0


# ---- parameters, models, losses, options ------------------------------------------------------------------
TIED = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3))
TIED[1].weight = TIED[0].weight
FROZEN, MIXED = net().requires_grad_(False), net()
MIXED[2].double()
ANY = lambda p, x: x[:, :3]  # noqa: E731
OWN = dict(NET.named_parameters())
EXPECTED = r"expected one of .*'exact'"
ARGUMENTS: dict[str, tuple] = {
    "typo": (lambda: K(params={"0.wieght": OWN["0.weight"]}), ValueError, r"'0\.wieght'", r"close names.*'0\.weight'"),
    "unknown name": (lambda: K(params={"zzz": OWN["0.weight"]}), ValueError, "no parameter 'zzz'"),
    "wrong shape": (lambda: K(params={"0.weight": torch.zeros(D, 5)}), ValueError, r"\(4, 5\), expected \(5, 4\)"),
    "tied twice": (
        lambda: K(TIED, params={f"{i}.weight": TIED[0].weight for i in (0, 1)}),
        ValueError, r"'0\.weight' and '1\.weight'", "tied", "one name",
    ),
    "listed twice": (lambda: K(TIED, params=[TIED[i].weight for i in (0, 1)]), ValueError, r"\[1\]", "second time"),
    "foreign": (lambda: K(params=[OWN["0.weight"], torch.ones(3)]), ValueError, r"\[1\]", "no param", "dictionary"),
    "names": (lambda: K(params=["0.weight"]), TypeError, r"params\[0\]: found '0\.weight'", "dictionary"),
    "a tensor": (lambda: K(params=OWN["0.weight"]), TypeError, "found Parameter", "a dictionary, a list"),
    "none": (lambda: K(params={}), ValueError, "found none", "at least one parameter"),
    "frozen": (lambda: K(FROZEN), ValueError, "found none", "requires a gradient"),
    "arrays": (lambda: K(ANY, params={"w": np.ones(3)}), TypeError, r"params\['w'\]: found ndarray"),
    "integers": (lambda: K(ANY, params={"w": torch.ones(3).int()}), TypeError, "int32", "real floating point"),
    "complex": (lambda: K(ANY, params={"w": torch.ones(3) * 1j}), TypeError, "complex64", "real floating point"),
    "mixed dtypes": (
        lambda: K(MIXED),
        TypeError, r"'0\.weight' has torch\.float32, '2\.weight' has torch\.float64", "expected one", "convert",
    ),
    "mixed devices": (lambda: K(params=OWN | {"0.bias": OWN["0.bias"].to("meta")}), ValueError, r"'0\.bias' has meta"),
    "callable without params": (lambda: K(ANY), TypeError, "found NoneType", "callable model needs a dictionary"),
    "model": (lambda: K("net"), TypeError, "found 'net'", "a module or a callable"),
    "model class": (lambda: K(nn.Linear, params=W), TypeError, "found <class", "a module or a callable"),
    "loss class": (lambda: K(loss=nn.MSELoss), TypeError, "MSELoss", "an instance"),
    "loss string": (lambda: K(loss="mse"), TypeError, "'mse'", "loss module or a callable"),
    "loss reduction": (lambda: K(loss=nn.MSELoss(reduction="none")), ValueError, "'none'", r"\('mean', 'sum'\)"),
    "loss of a vector": (lambda: K(loss=lambda o, y: (o - y).square()), ValueError, r"\(4, 3\)", "0-dim", "mean"),
    "reduction": (lambda: K(reduction="avg"), ValueError, "'avg'", "'mean' or 'sum'"),
    "fisher_type": (lambda: K(fisher_type="typ2"), ValueError, "fisher_type: found 'typ2'", "'type-2', 'mc'"),
    "kfac_approx": (lambda: K(kfac_approx="x"), ValueError, "kfac_approx: found 'x'", "'expand', 'reduce'"),
    "unsupported": (lambda: K(unsupported="x"), ValueError, "unsupported: found 'x'", EXPECTED),
    "explain": (lambda: explain(NET, data=DATA, unsupported="x"), ValueError, "unsupported: found 'x'", EXPECTED),
    "mc_samples": (lambda: K(mc_samples=0), ValueError, "mc_samples: found 0", "positive integer"),
    "names in a list": (
        lambda: K(params=list(NET.named_parameters())),
        TypeError, r"params\[0\]: found \('0.weight', Parameter", r"dict\(model\.named_parameters\(\)\)",
    ),
    "meta": (lambda: K(nn.Linear(4, 3, device="meta")), ValueError, "found the meta device", "load or initialise"),
    "seed": (lambda: K(seed=None), TypeError, "seed: found None", "an integer"),
    "num_data": (lambda: K(num_data=7), ValueError, "num_data: found 7", "hold 6", "correct it"),
    "loss terms": (
        lambda: K(num_per_example_loss_terms=2),
        ValueError, "num_per_example_loss_terms: found 2", "6 loss terms for 6 data", "correct it",
    ),
    "batch_size_fn": (lambda: K(batch_size_fn=lambda X: 3), ValueError, "batch_size_fn: found 3", "a divisor"),
    "scalar prediction": (lambda: K(lambda p, x: (x @ p["w"].T).sum(), params=W), ValueError, "0-dim", "data first"),
    "no prediction": (lambda: K(lambda p, x: None, params=W), TypeError, "returned NoneType", "expected a tensor"),
    "decay": (lambda: K().update(DATA, 1.5), ValueError, "decay: found 1.5", "from 0 to 1"),
    "merge": (lambda: K().merge(3), TypeError, "found int", "KFACLinearOperator"),
    "ignored": (
        lambda: K(loss=nn.CrossEntropyLoss(), data=[(DATA[0][0], torch.full((4,), -100))]),
        ValueError, "divides by 0", "all targets ignored",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_input_arguments(name: str) -> None:
    call, error, *words = ARGUMENTS[name]
    with refused(error, *words, models=(TIED,)):
        call()


# ---- products and inverses ------------------------------------------------------------------------------------
DEAD = net()
nn.init.constant_(DEAD[0].bias, -100.0)
BLOCKS = [torch.randn(5, D), torch.randn(5), torch.randn(3, 5), torch.randn(3)]
USES: dict[str, tuple[Callable[[KFACLinearOperator], Any], Any]] = {
    "short": (lambda k: k @ torch.ones(42), (ValueError, r"\(42,\)", r"\(43,\)")),
    "long columns": (lambda k: k @ torch.ones(44, 2), (ValueError, r"\(44, 2\)", r"\(43, K\)")),
    "numpy": (lambda k: k @ np.ones(42), (ValueError, r"shape \(42,\), expected \(43,\)")),
    "dtype": (lambda k: k @ torch.ones(43).double(), (TypeError, "float64", "expected torch.float32", r"\.to\(")),
    "device": (lambda k: k @ torch.ones(43, device="meta"), (ValueError, "on meta", "expected cpu", r"\.to\(")),
    "too few blocks": (lambda k: k @ BLOCKS[:1], (ValueError, "1 blocks", "expected 4")),
    "wrong block": (lambda k: k @ [*BLOCKS[:2], BLOCKS[0], BLOCKS[3]], (ValueError, r"'2\.weight', expected \(3, 5\)")),
    "mixed blocks": (lambda k: k @ [BLOCKS[0].double(), *BLOCKS[1:]], (TypeError, "64", r"'0\.weight'", "32")),
    "missing name": (lambda k: k @ {"0.weight": BLOCKS[0]}, (ValueError, r"missing.*'2\.bias'")),
    "unknown block": (lambda k: k.block("zzz"), (ValueError, "'zzz'", r"expected one of.*'0\.weight'")),
    "negative damping": (lambda k: k.inverse(-1.0), (ValueError, "damping=-1.0", ">= 0")),
    "negative by layer": (lambda k: k.inverse(lambda label: -1.0), (ValueError, "damping=-1.0", r"'0\.weight'")),
    "NaN damping": (lambda k: k.inverse(NAN), (ValueError, "damping=nan", ">= 0")),
    "damping for nobody": (lambda k: k.inverse({"zzz": 1.0}), (ValueError, r"unknown keys \['zzz'\]", r"'0\.weight'")),
    "how": (lambda k: k.inverse(0.1, how="exct"), (ValueError, "how='exct'", "'exact', 'heuristic', 'factors'")),
    "singular": (lambda k: k.inverse(), (ValueError, r"'0\.weight'", "singular", "`damping` > 0")),
    "singular factors": (lambda k: k.inverse(how="factors"), (ValueError, r"'0\.weight'", "singular", "`damping` > 0")),
    "negative power": (lambda k: k.power(-0.5), (ValueError, r"'0\.weight'", "smallest eigenvalue is 0", "damping")),
}


@pytest.mark.parametrize("name", USES)
def test_bad_input_uses(name: str) -> None:
    use, (error, *words) = USES[name]
    k = K(DEAD, fisher_type="type-2")
    before = k.to_dense()
    with refused(error, *words, models=(DEAD,)):
        use(k)
    assert torch.equal(k.to_dense(), before)
