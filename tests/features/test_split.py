"""Parts of layers as layers of their own: experts, heads and equal parts, against sums written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import featlearn as fl
from featlearn.features import measurement_plan
from oracles import PlainAttention

DECAY = 0.3
Call = Callable[[nn.Module, Tensor], Tensor]
Matrices = dict[str, Tensor]


# --- the reference: one sample and one output at a time -------------------------------------------


@contextmanager
def watched(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Zeros that are added to the outputs of modules, to be differentiated by."""
    zeros: dict[str, list[Tensor]] = {name: [] for name in modules}

    def hook(name: str) -> Callable[..., Tensor]:
        def add(module: nn.Module, args: Any, h: Tensor) -> Tensor:
            zeros[name].append(torch.zeros_like(h, requires_grad=True))
            return h + zeros[name][-1]

        return add

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield zeros
    finally:
        for handle in handles:
            handle.remove()


def gradients(call: Call, model: nn.Module, modules: dict[str, nn.Module], x: Tensor, y: Tensor) -> dict[str, Any]:
    """J of each sample and output, and the gradients g of each sample's loss, as lists of (rows, k_out) by name."""
    result: dict[str, Any] = {name: ([], []) for name in modules}
    for i in range(len(x)):
        with watched(modules) as zeros:
            output = call(model, x[i : i + 1])
        losses = F.cross_entropy(output, y[i : i + 1])
        for which, scalars in ((0, output.flatten()), (1, losses[None])):
            for scalar in scalars:
                for name, of_calls in zeros.items():
                    if not of_calls:
                        continue
                    grads = torch.autograd.grad(scalar, of_calls, retain_graph=True, allow_unused=True)
                    rows = [torch.zeros_like(z) if g is None else g for g, z in zip(grads, of_calls, strict=True)]
                    result[name][which].append([row.reshape(-1, row.shape[-1]) for row in rows])
    return result


def gram(several: list[list[Tensor]], n: int, k: int) -> Tensor:
    total = torch.zeros(k, k, dtype=torch.float64)
    for calls in several:
        for rows in calls:
            for row in rows:
                total += torch.outer(row, row)
    return total / n


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


class Reference:
    """K, Kb, B and dL/dW of whole matrices, from which parts are cut by slices."""

    def __init__(
        self, call: Call, plain: nn.Module, start: nn.Module, x: Tensor, y: Tensor, places: dict[str, tuple[str, str]]
    ) -> None:
        """`places`: path of the watched module, and path of the parameter, by name."""
        n = len(x)
        find = {name: plain.get_submodule(path) for name, (path, _) in places.items()}
        before = {name: start.get_submodule(path) for name, (path, _) in places.items()}
        now, then = (gradients(call, m, mods, x, y) for m, mods in ((plain, find), (start, before)))
        loss = F.cross_entropy(call(plain, x), y)
        self.values: dict[str, Matrices] = {}
        for name, (_, path) in places.items():
            parameter = plain.get_parameter(path)
            (d,) = torch.autograd.grad(loss, parameter, retain_graph=True)
            js, gs = now[name]
            k = next((rows.shape[1] for calls in js for rows in calls), 0)
            self.values[name] = {
                "W": parameter.detach(),
                "W0": start.get_parameter(path).detach(),
                "D": d,
                "K": gram(js, n, k),
                "B": gram(gs, n, k),
            }
            pairs = [list(zip(a, b, strict=True)) for a, b in zip(js, then[name][0], strict=True)]
            if all(j.shape == j0.shape for calls in pairs for j, j0 in calls):
                self.values[name]["Kb"] = gram([[j - j0 for j, j0 in calls] for calls in pairs], n, k)


def rows_of(values: Matrices, part: slice, transposed: bool = False) -> Matrices:
    """The part of the outputs of a layer whose weight is (k_out, k_in), or transposed."""
    weights = {key: values[key].T if transposed else values[key] for key in ("W", "W0", "D")}
    return {k: v[part] for k, v in weights.items()} | {k: values[k][part, part] for k in ("K", "Kb", "B")}


def columns_of(values: Matrices, part: slice, transposed: bool = False) -> Matrices:
    """The part of the inputs of a layer: its gradients at the outputs are those of the layer."""
    weights = {key: values[key].T if transposed else values[key] for key in ("W", "W0", "D")}
    return {k: v[:, part] for k, v in weights.items()} | {k: values[k] for k in ("K", "Kb", "B")}


def close(result: Tensor | float, expected: Tensor | float, what: str) -> None:
    result, expected = torch.as_tensor(result), torch.as_tensor(expected)
    assert result.shape == expected.shape, what
    assert float((result - expected).norm()) <= 1e-9 * max(float(expected.norm()), 1e-12), what


def check(features: fl.LayerFeatures, v: Matrices, everything: bool = True) -> None:
    w, k, name = v["W"], v["K"], features.name
    nfm, agop = w.T @ w, w.T @ k @ w
    close(features.nfc, cosine(nfm, agop), f"nfc of {name}")
    if not everything:
        return
    fact, change = -w.T @ v["D"] / DECAY, w - v["W0"]
    close(features.nfm, nfm, name)
    close(features.agop, agop, name)
    close(features.enfa, w.T @ v["B"] @ w, name)
    if "K" in features.sums:  # not only its projection on the inputs
        close(features.ptk_covariance, k, name)
        close(features.benfa, v["B"], name)
    close(features.fact, fact, name)
    close(features.bfact, -w @ v["D"].T / DECAY, name)
    close(features.correlation("fact"), cosine(nfm, fact), name)
    close(features.relgrad, float((v["D"] + DECAY * w).norm() / (DECAY * w.norm())), name)
    close(features.centered_nfc, cosine(change.T @ change, change.T @ k @ change), name)
    close(features.weight_change, float(change.norm() / v["W0"].norm()), name)
    if "Kb" in v:
        close(features.double_centered_nfc, cosine(change.T @ change, change.T @ v["Kb"] @ change), name)
        close(features.ptk_centered_nfc, cosine(v["W0"].T @ v["W0"], v["W0"].T @ v["Kb"] @ v["W0"]), name)


def check_all(
    model: nn.Module,
    start: nn.Module,
    x: Tensor,
    y: Tensor,
    expected: dict[str, Matrices],
    call: Call | None,
    **options: Any,
) -> None:
    """Compare all quantities and the NFC alone, in batches of one sample and of all."""
    forward = None if call is None else (lambda m, batch: call(m, batch[0]))
    full: dict[str, Any] = {"initial": start, "loss": nn.CrossEntropyLoss(), "weight_decay": DECAY}
    for size in (1, len(x)):
        report = fl.probe(model, (x, y), forward=forward, batch_size=size, **full, **options)
        alone = fl.probe(model, (x, y), forward=forward, batch_size=size, measure="nfc", **options)
        for name, values in expected.items():
            check(report[name], values)
            check(alone[name], values, everything=False)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().double().eval()
        for p in model.parameters():
            nn.init.normal_(p, std=0.5)
        return model


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGET = torch.tensor([0, 2, 1, 2])


# --- heads ----------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(6, 3, batch_first=True, **options)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        other = x[..., :4] if self.attn.kdim == 4 else x
        mixed, _ = self.attn(x, other, other, need_weights=False)
        return self.head(torch.tanh(x + mixed).mean(1))


@pytest.mark.parametrize("options", [{}, {"kdim": 4, "vdim": 4}], ids=["packed", "other widths"])
def test_heads_of_multihead_attention(options: dict[str, Any]) -> None:
    model, start = (seeded(lambda: Attends(**options), seed) for seed in (0, 1))
    x, plain = draw(4, 5, 6), []
    for m in (model, start):
        plain.append(copy.deepcopy(m))
        plain[-1].attn = PlainAttention(m.attn)
        plain[-1].attn.double()
        plain[-1].attn.kdim = m.attn.kdim
    places = {part: (f"attn.{part}", f"attn.{part}.weight") for part in ("q", "k", "v", "out")}
    whole = Reference(lambda m, x: m(x), *plain, x, TARGET, places).values
    expected = {}
    for h in range(3):
        part = slice(2 * h, 2 * h + 2)
        expected |= {f"attn.{p}.{h}": rows_of(whole[p], part) for p in "qkv"}
        expected[f"attn.out.{h}"] = columns_of(whole["out"], part)
    check_all(model, start, x, TARGET, expected, None, split="heads")
    assert [*fl.probe(model, x, split="heads")] == [
        *(f"attn.{p}.{h}" for p in ("q", "k", "v", "out") for h in range(3)),
        "head",
    ]


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    result: Tensor = model(input_ids=ids, use_cache=False).logits[:, -1, :3]
    return result


IDS = torch.tensor([[1, 5, 2, 0], [4, 4, 1, 3], [2, 0, 5, 1], [3, 1, 1, 2]])


def test_heads_of_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=7, n_positions=6, n_embd=6, n_layer=1, n_head=3, bos_token_id=0, eos_token_id=0
    )
    model, start = (seeded(lambda: transformers.GPT2LMHeadModel(config), seed) for seed in (0, 1))
    attn = "transformer.h.0.attn"
    places = {p: (f"{attn}.{p}", f"{attn}.{p}.weight") for p in ("c_attn", "c_proj")}
    plain, before = copy.deepcopy(model), copy.deepcopy(start)
    whole = Reference(logits, plain, before, IDS, TARGET, places).values
    expected = {}
    for h in range(3):
        for at, p in enumerate("qkv"):
            rows = slice(6 * at + 2 * h, 6 * at + 2 * h + 2)
            expected[f"{attn}.c_attn.{p}.{h}"] = rows_of(whole["c_attn"], rows, transposed=True)
        expected[f"{attn}.c_proj.{h}"] = columns_of(whole["c_proj"], slice(2 * h, 2 * h + 2), transposed=True)
    check_all(model, start, IDS, TARGET, expected, logits, split="heads", layers="*.attn.*")


def test_heads_of_llama_with_shared_keys_and_values() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=10, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=2,
    )  # fmt: skip

    def make() -> nn.Module:
        llama: nn.Module = transformers.LlamaForCausalLM(config)
        for path, module in list(llama.named_modules()):
            if "RMSNorm" in type(module).__name__:  # computes in single precision, also in a float64 model
                llama.set_submodule(path, nn.RMSNorm(8, eps=1e-6))
        return llama

    model, start = (seeded(make, seed) for seed in (0, 1))
    attn = "model.layers.0.self_attn"
    places = {p: (f"{attn}.{p}", f"{attn}.{p}.weight") for p in ("q_proj", "k_proj", "v_proj", "o_proj")}
    whole = Reference(logits, copy.deepcopy(model), copy.deepcopy(start), IDS, TARGET, places).values
    expected = {}
    for h in range(4):
        part = slice(2 * h, 2 * h + 2)
        expected[f"{attn}.q_proj.{h}"] = rows_of(whole["q_proj"], part)
        expected[f"{attn}.o_proj.{h}"] = columns_of(whole["o_proj"], part)
        if h < 2:
            expected |= {f"{attn}.{p}.{h}": rows_of(whole[p], part) for p in ("k_proj", "v_proj")}
    check_all(model, start, IDS, TARGET, expected, logits, split="heads", layers="*.self_attn.*")
    assert set(fl.probe(model, {"input_ids": IDS}, forward=lambda m, b: logits(m, b["input_ids"]), split="heads")) > {
        *expected
    }


class Own(nn.Module):
    """Attention of one's own, with the attributes and names of a test."""

    def __init__(self, sizes: dict[str, tuple[int, int]], **attributes: Any) -> None:
        super().__init__()
        self.attn = nn.Module()
        for name, (k_in, k_out) in sizes.items():
            self.attn.add_module(name, nn.Linear(k_in, k_out))
        for name, value in attributes.items():
            setattr(self.attn, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tanh(layer(x[:, : layer.in_features])) for layer in self.attn.children()], 1)[:, :50]


@pytest.mark.parametrize(
    ("sizes", "attributes", "expected"),
    [
        ({"q": (8, 8), "k": (8, 8), "out": (8, 8)}, {"heads": 4}, "q.4 k.4 out.4"),
        ({"wq": (8, 8), "wk": (8, 2), "wv": (8, 2)}, {"n_heads": 4}, "wq.4 wk.1 wv.1"),
        ({"wq": (8, 8), "wk": (8, 4), "wv": (8, 4)}, {"n_heads": 4, "n_kv_heads": 2}, "wq.4 wk.2 wv.2"),
        ({"qkv": (8, 24), "proj": (8, 8)}, {"num_heads": 2, "head_dim": 4}, "qkv.6 proj.2"),
        ({"qkv_proj": (8, 16)}, {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 2}, "qkv_proj.8"),
        ({"q_proj": (8, 8)}, {"head_dim": 2}, "q_proj.4"),
        # A gate beside the queries, values of another width, an unknown order of rows: not split.
        ({"q_proj": (8, 16), "k_proj": (8, 8)}, {"num_heads": 4, "head_dim": 2}, "q_proj k_proj.4"),
        ({"q": (8, 8), "k": (8, 8), "v": (8, 4)}, {"heads": 4}, "q.4 k.4 v"),
        ({"query_key_value": (8, 24), "dense": (8, 8)}, {"num_heads": 4, "head_dim": 2}, "query_key_value dense.4"),
    ],
)
def test_heads_are_found_by_what_a_module_states(
    sizes: dict[str, tuple[int, int]], attributes: dict[str, Any], expected: str
) -> None:
    model = seeded(lambda: Own(sizes, **attributes), 0)
    report = fl.probe(model, draw(3, 8), split="heads")
    for text in expected.split():
        name, _, count = text.partition(".")
        parts = [part for part in report if part.split(".")[1] == name]
        if count:
            assert len(parts) == int(count)
            assert not any(report[part].flags for part in parts)
        else:
            assert parts == [f"attn.{name}"]
            assert report[f"attn.{name}"].flags[0].startswith("not split into heads: ")


def test_heads_of_bert_and_of_our_gpt() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=7, hidden_size=6, num_hidden_layers=1, num_attention_heads=3, intermediate_size=12
    )
    model = transformers.BertModel(config).eval()
    report = fl.probe(model, {"input_ids": IDS}, forward=lambda m, b: m(**b).pooler_output, split="heads")
    attn = "encoder.layer.0.attention"
    for name in ("self.query", "self.key", "self.value", "output.dense"):
        assert [p for p in report if p.startswith(f"{attn}.{name}")] == [f"{attn}.{name}.{h}" for h in range(3)]
    assert {"encoder.layer.0.output.dense", "pooler.dense"} < {*report}
    gpt = fl.models.gpt(vocabulary=7, length=4, blocks=1, heads=2, width=4)
    assert len(fl.probe(gpt, IDS, split="heads", outputs=2)) == 4 * 2 + 3


class PerHead(nn.Module):
    """Query by an einsum with the heads as outputs (in two orders), and one matrix per head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.w_q, self.w_k = nn.Parameter(torch.empty(5, 2, 3)), nn.Parameter(torch.empty(5, 3, 2))
        self.w_v, self.w_o = nn.Parameter(torch.empty(2, 3, 3)), nn.Parameter(torch.empty(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        q = torch.tanh(torch.einsum("nd,dhk->nhk", x, self.w_q))
        k = torch.tanh(torch.einsum("nd,dkh->nhk", x, self.w_k))
        v = torch.tanh(torch.einsum("nhk,hkl->nhl", q * k, self.w_v))
        return torch.einsum("nhl,hlo->no", v, self.w_o)


def test_heads_of_products() -> None:
    model = seeded(PerHead, 0)
    report, whole = (fl.probe(model, draw(4, 5), split=split) for split in ("heads", None))
    assert [*report] == ["w_q.0", "w_q.1", "w_k", "w_v.0", "w_v.1", "w_o.0", "w_o.1"]
    assert report["w_k"].flags == ("not split into heads: the entries of a head are not adjacent",)
    for h in range(2):
        part = slice(3 * h, 3 * h + 3)
        close(report[f"w_q.{h}"].ptk_covariance, whole["w_q"].ptk_covariance[part, part], "q")
        close(report[f"w_q.{h}"].nfm, model.w_q[:, h].detach() @ model.w_q[:, h].detach().T, "q")
        close(report[f"w_v.{h}"].agop, whole["w_v"].agop[h], "v")
        close(report[f"w_o.{h}"].agop, whole["w_o"].agop[part, part], "o")


# --- experts --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A stack of experts: as a loop, by gathered matrices, or by sorted rows; `seen` is watched by the reference."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Parameter(torch.empty(3, 8, 16)), nn.Parameter(torch.empty(3, 16, 8))
        self.seen_up, self.seen_down = (nn.ModuleList(nn.Identity() for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        if self.way == "gather":
            h = torch.tanh(torch.bmm(x[:, None], self.up[chosen]))
            return torch.bmm(h, self.down[chosen])[:, 0]
        if self.way == "grouped":
            order = chosen.argsort()
            ends = torch.bincount(chosen, minlength=3).cumsum(0).to(torch.int32)
            h = torch.tanh(F.grouped_mm(x[order], self.up, offs=ends))
            return torch.zeros_like(x).index_copy(0, order, F.grouped_mm(h, self.down, offs=ends))
        out = torch.zeros_like(x)
        for i in range(3):
            at = (chosen == i).nonzero().squeeze(1)
            if len(at):
                h = torch.tanh(self.seen_up[i](x[at] @ self.up[i]))
                out = out.index_copy(0, at, self.seen_down[i](h @ self.down[i]))
        return out


class Mixture(nn.Module):
    def __init__(self, way: str = "loop") -> None:
        super().__init__()
        self.experts, self.head = Experts(way), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.experts(x, x[:, :3].argmax(1))))


@pytest.mark.parametrize("way", ["loop", "gather", "grouped"])
def test_experts(way: str) -> None:
    single = way == "grouped"
    if single and not hasattr(F, "grouped_mm"):
        pytest.skip("this PyTorch has no grouped_mm")
    model, start = (seeded(lambda: Mixture(way), seed) for seed in (0, 1))
    if single:  # grouped_mm has no double precision
        for m in (model, start):
            m.float()
    plain, before = (copy.deepcopy(m).double() for m in (model, start))
    plain.experts.way = before.experts.way = "loop"
    x = draw(4, 8)
    x[:, :3] += 3 * torch.eye(4, 3, dtype=torch.float64)
    x = x.float().double()
    places = {f"{p}.{i}": (f"experts.seen_{p}.{i}", f"experts.{p}") for p in ("up", "down") for i in range(3)}
    whole = Reference(lambda m, x: m(x), plain, before, x, TARGET, places).values
    expected = {}
    for key, v in whole.items():
        name, i = key[:-2], int(key[-1])
        # Which rows an expert gets is a choice of the model: J - J0 is not measured for experts.
        weights = {k: v[k][i].T for k in ("W", "W0", "D")}
        expected[f"experts.{i}.{name}"] = weights | {k: v[k] for k in ("K", "B")}
    if not single:
        check_all(model, start, x, TARGET, expected, None, split="experts")
    for options in ({}, {"measure": "nfc"}):
        for size in (1, 4):
            report = fl.probe(model, x.to(next(model.parameters())), batch_size=size, split="experts", **options)
            assert [*report] == [*(f"experts.{i}.{p}" for p in ("up", "down") for i in range(3)), "head"]
            for name, v in expected.items():
                nfm, agop = v["W"].T @ v["W"], v["W"].T @ v["K"] @ v["W"]
                assert report[name].nfc == pytest.approx(cosine(nfm, agop), rel=1e-5 if single else 1e-9)


def test_an_expert_without_rows_is_flagged() -> None:
    model, x = seeded(Mixture, 0), draw(6, 8)
    x[:, 1] = -9.0
    report = fl.probe(model, x, split="experts")
    assert report["experts.1.up"].flags == ("the output does not depend on this layer",)
    assert not report["experts.0.up"].flags


class Dense(nn.Module):
    """Experts that all get every row, as in a bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Parameter(torch.empty(3, 5, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.bmm(x.expand(3, *x.shape), self.up)).mean(0))


def test_names_of_experts() -> None:
    x = draw(4, 5)
    model = seeded(lambda: nn.ModuleDict({"experts": Dense()}), 0)
    report = fl.probe(model, x, forward=lambda m, x: m["experts"](x), split="experts")
    assert [*report] == ["experts.0.up", "experts.1.up", "experts.2.up", "experts.head"]
    assert report.coverage["layers"].tolist() == ["experts.{0..2}.up", "experts.head"]
    assert report.parameters[0].layers == ("experts.0.up", "experts.1.up", "experts.2.up")
    with pytest.raises(fl.InputError, match="split='experts' needs a stack of experts, got none in 2 layers"):
        fl.probe(seeded(Dense, 0), x, split="experts")
    assert [*fl.probe(seeded(Dense, 0), x, split={"up": 3})] == ["up.0", "up.1", "up.2", "head"]


# --- equal parts, and the rest of a report --------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("side", ["outputs", "inputs"])
def test_equal_parts_of_the_outputs(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "inputs":  # as for layers of more than 2048 outputs
        monkeypatch.setattr(measurement_plan, "_OUTER_UP_TO", 0)
    model, start = (seeded(Net, seed) for seed in (0, 1))
    x = draw(4, 4)
    places = {p: (p, f"{p}.weight") for p in ("up", "down")}
    whole = Reference(lambda m, x: m(x), copy.deepcopy(model), copy.deepcopy(start), x, TARGET, places).values
    for parts in (2, 3, 12):  # parts of six rows are taller than wide
        size = 12 // parts
        expected = {f"up.{i}": rows_of(whole["up"], slice(size * i, size * i + size)) for i in range(parts)}
        check_all(model, start, x, TARGET, expected, None, split={"u?": parts})
    assert ("K" in fl.probe(model, x, split={"up": 2})["up.0"].sums) == (side == "outputs")


class Narrow(nn.Module):
    """Heads whose output projection is taller than wide, so that its sums are on the side of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = 2
        self.q, self.o, self.head = nn.Linear(5, 4), nn.Linear(4, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.o(torch.tanh(self.q(x)))))


@pytest.mark.parametrize("side", ["outputs", "inputs"])
def test_columns_of_a_tall_matrix(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "inputs":
        monkeypatch.setattr(measurement_plan, "_OUTER_UP_TO", 0)
    model, start = (seeded(Narrow, seed) for seed in (0, 1))
    x = draw(4, 5)
    whole = Reference(
        lambda m, x: m(x), copy.deepcopy(model), copy.deepcopy(start), x, TARGET, {"o": ("o", "o.weight")}
    ).values
    expected = {f"o.{h}": columns_of(whole["o"], slice(2 * h, 2 * h + 2)) for h in range(2)}
    check_all(model, start, x, TARGET, expected, None, split="heads")
    # The NFC alone is measured by gradients at the inputs.
    assert "agop" in fl.probe(model, x, split="heads", measure="nfc")["o.0"].sums


def test_parts_of_convolutions_and_gates() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv1d(4, 12, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2)), 0)
    x = draw(5, 4, 4)
    whole = fl.probe(model, x)["0"]
    report = fl.probe(model, x, split={"0": 4})
    assert report["0.3"].shape == (1, 3, 4)
    for i in range(4):
        part = slice(3 * (i % 2), 3 * (i % 2) + 3)
        close(report[f"0.{i}"].ptk_covariance, whole.ptk_covariance[i // 2][part, part], "conv")
    close(fl.probe(model, x, split={"0": 2})["0.1"].agop, whole.agop[1], "conv")


def test_noise_of_parts_adds_up() -> None:
    model, x = seeded(Attends, 0), draw(16, 5, 6)
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "weight_decay": DECAY, "batch_size": 8}
    y = torch.arange(16) % 3
    whole, parts = (fl.probe(model, (x, y), split=split, **options) for split in (None, "heads"))
    for name in ("attn.q", "attn.out"):
        squares = sum(parts[f"{name}.{h}"].gradient_noise ** 2 for h in range(3))
        assert squares == pytest.approx(whole[name].gradient_noise ** 2, rel=1e-9)


def test_parts_are_saved_merged_and_sketched(tmp_path: Path) -> None:
    model, start = (seeded(Attends, seed) for seed in (0, 1))
    x, y = draw(8, 5, 6), torch.arange(8) % 3
    options: dict[str, Any] = {"initial": start, "loss": nn.CrossEntropyLoss(), "weight_decay": DECAY, "split": "heads"}
    report = fl.probe(model, (x, y), **options)
    report.save(tmp_path / "report")
    loaded = fl.Report.load(tmp_path / "report")
    assert loaded.table("all").equals(report.table("all"))
    first, second = (fl.FeatureAccumulator(model, **options) for _ in range(2))
    first.update((x[:3], y[:3]))
    second.update((x[3:], y[3:]))
    empty = fl.FeatureAccumulator(model, **options)
    empty.merge_state(first)
    empty.merge_state(second)
    for name, features in empty.compute().items():
        for key, value in features.sums.items():
            close(value, report[name].sums[key], f"{key} of {name}")
    other = fl.FeatureAccumulator(model, **options | {"split": None})
    with pytest.raises(fl.InputError, match="same layers and quantities"):
        other.merge_state(first)
    sketched = fl.probe(model, (x, y), outputs=8, **options)
    assert sketched["attn.out.1"].standard_error("nfc") > 0


def test_decay_and_patterns_of_whole_layers() -> None:
    model, x = seeded(Attends, 0), draw(8, 5, 6)
    y = torch.arange(8) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=DECAY)
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "layers": "attn.[qv]", "split": ["heads", {"attn.v": 2}]}
    for decay in (optimizer, {"attn.*": DECAY}):
        report = fl.probe(model, (x, y), weight_decay=decay, dtype=torch.float32, **options)
        assert [*report] == ["attn.q.0", "attn.q.1", "attn.q.2", "attn.v.0", "attn.v.1"]
        assert all(features.weight_decay == DECAY for features in report.values())
    rows = fl.probe(model, x, split=("heads",), layers="attn.*").coverage["layers"].tolist()
    assert rows[:2] == ["attn.q.{0..2}, attn.k.{0..2}, attn.v.{0..2}", "attn.out.{0..2}"]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("head", "split must be 'experts', 'heads', a mapping {glob: parts} or a list, got 'head'."),
        (3, "split must be 'experts', 'heads', a mapping {glob: parts} or a list, got 3."),
        ([], "split must name at least one kind or pattern, got none. Leave it out to split no layer."),
        ({"up": 1}, "split must map glob patterns to numbers of parts from 2, got 'up': 1."),
        ({"up": 2.0}, "split must map glob patterns to numbers of parts from 2, got 'up': 2.0."),
        ({"up": 5}, "split must divide the 12 outputs of layer 'up' into equal parts, got 5 parts."),
        ({"upp": 2}, "split='upp' matches no layer; there are 2, for instance up"),
        ("heads", "split='heads' needs attention whose number of heads is known, got none in 2 layers. "),
        ("experts", "split='experts' needs a stack of experts, got none in 2 layers. "),
    ],
)
def test_invalid_arguments(split: Any, message: str) -> None:
    with pytest.raises(fl.InputError) as error:
        fl.probe(seeded(Net, 0), draw(3, 4), split=split)
    assert str(error.value).startswith(message)
