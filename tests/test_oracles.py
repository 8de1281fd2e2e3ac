"""The oracles and cases themselves: checks that would fail if a reference were wrong."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases import CASES, Case, call, perturbed, samples, target
from oracles import (
    BACKWARD,
    CONVOLUTIONS,
    FORWARD,
    GATES,
    PlainAttention,
    as_matrix,
    as_positions,
    cosine,
    egop_reference,
    forward_with_offsets,
    jacobians,
    loss_gradients,
    norm,
    pearson,
    plain,
    reference,
)

BY_NAME = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def read(model: nn.Module, path: str) -> Tensor:
    for part in path.split("."):
        model = getattr(model, part)
    return model


def part_of(name: str, path: str, value: Tensor) -> Tensor:
    """The rows of a parameter, or of its gradient, that a layer uses: one projection, or one gate."""
    if path.endswith("in_proj_weight"):
        return value.chunk(3)["qkv".index(name[-1])]
    if "weight_ih_l" in path or "weight_hh_l" in path:
        names = next(names for names in GATES.values() if name[-1] in names)
        return value.chunk(len(names))[names.index(name[-1])]
    return value


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return a.shape == b.shape and norm(a - b) <= tolerance * max(norm(a), norm(b), 1e-300)


# --- cases ----------------------------------------------------------------------------------------


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


@every_case
def test_case_is_deterministic_float64_and_in_eval_mode(case: Case) -> None:
    state = torch.get_rng_state()
    first, second = case.make(), case.make()
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in first.modules())
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
        assert not a.is_floating_point() or a.dtype == torch.float64
    assert torch.equal(target(case.batch()), target(case.batch()))
    assert torch.equal(call(case, first, case.batch()), call(case, second, case.batch()))


@every_case
def test_samples_do_not_interact(case: Case) -> None:
    model, _ = perturbed(case)
    batch = case.batch()
    parts = samples(batch)
    assert 5 <= len(parts) <= 7
    whole = call(case, model, batch)
    single = torch.cat([call(case, model, sample) for sample in parts])
    assert whole.shape[0] == len(parts)
    assert whole[0].numel() == case.outputs <= 64
    assert close(whole.detach(), single.detach())
    loss = case.loss(whole, target(batch))
    assert loss.shape == (len(parts),)
    assert close(loss.detach(), torch.cat([case.loss(call(case, model, s), target(s)) for s in parts]).detach())


@every_case
def test_batch_is_not_changed_by_the_model(case: Case) -> None:
    model, batch = case.make(), case.batch()
    call(case, model, batch)
    fresh = case.batch()
    given = list(batch.values()) if isinstance(batch, dict) else list(batch)
    expected = list(fresh.values()) if isinstance(fresh, dict) else list(fresh)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


@every_case
def test_every_matrix_parameter_is_accounted_for(case: Case) -> None:
    model = case.make()
    taken: set[int] = set()
    for path in case.layers.values():
        module_path, _, name = path.rpartition(".")
        module = model.get_submodule(module_path)
        if name in getattr(module, "parametrizations", ()):
            taken |= {id(parameter) for parameter in module.parametrizations[name].parameters()}
        else:
            taken.add(id(read(model, path)))
    refused = {id(model.get_parameter(name)) for name in case.not_taken}
    # by identity, so that a tied parameter counts once
    matrices = {id(parameter): name for name, parameter in model.named_parameters() if parameter.dim() >= 2}
    assert not taken & refused
    assert {matrices.get(i) for i in taken | refused} == set(matrices.values())


@every_case
def test_perturbation_moves_every_parameter_and_only_the_copy(case: Case) -> None:
    model, initial = perturbed(case)
    pairs = list(zip(model.parameters(), initial.parameters(), strict=True))
    assert all(not torch.equal(after, before) for after, before in pairs)
    assert all(after.requires_grad == before.requires_grad for after, before in pairs)
    fresh = case.make()
    assert all(torch.equal(a, b) for a, b in zip(initial.parameters(), fresh.parameters(), strict=True))


# --- the plain copy -------------------------------------------------------------------------------


@every_case
def test_plain_copy_computes_the_same_and_leaves_the_model_alone(case: Case) -> None:
    model, _ = perturbed(case)
    before = call(case, model, case.batch()).detach()
    copied = plain(model)
    assert not any(isinstance(module, nn.MultiheadAttention | nn.RNNBase) for module in copied.modules())
    assert close(call(case, copied, case.batch()).detach(), before)
    assert torch.equal(call(case, model, case.batch()).detach(), before)


@every_case
def test_matrix_of_a_layer_is_the_parameter_the_case_names(case: Case) -> None:
    model, _ = perturbed(case)
    copied = plain(model)
    for name, path in case.layers.items():
        module = copied.get_submodule(name)
        given = read(model, path).detach()
        given = part_of(name, path, given)
        assert torch.equal(as_matrix(module, module.weight.detach()), as_matrix(module, given))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "causal", "float", "per-head", "padding", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"kdim": 3, "vdim": 5, "add_bias_kv": True},
    ],
    ids=str,
)
def test_plain_attention_equals_torch(batch_first: bool, masks: str, options: dict) -> None:
    n, source, length, heads = 3, 5, 4, 2
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    original = nn.MultiheadAttention(6, heads, batch_first=batch_first, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(0.5 * draw(*parameter.shape))
    inputs = [draw(n, length, 6), draw(n, source, original.kdim), draw(n, source, original.vdim)]
    if not batch_first:
        inputs = [part.transpose(0, 1) for part in inputs]
    given = {}
    if masks in ("causal", "both"):
        given["attn_mask"] = torch.ones(length, source, dtype=torch.bool).triu(1)
    if masks == "float":
        given["attn_mask"] = draw(length, source)
    if masks == "per-head":
        given["attn_mask"] = draw(n * heads, length, source)
    if masks in ("padding", "both"):
        given["key_padding_mask"] = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    expected = original(*inputs, **given)[0].detach()
    assert expected.isfinite().all()
    assert close(PlainAttention(original)(*inputs, **given)[0].detach(), expected)


# --- derivatives ----------------------------------------------------------------------------------


@every_case
def test_jacobian_predicts_finite_differences(case: Case) -> None:
    """Moves each layer's pre-activations along one direction and back."""
    model, _ = perturbed(case)
    sample = samples(case.batch())[0]
    analytic = jacobians(case, model)
    for name in case.layers:
        module = plain(model).get_submodule(name)
        directions: list[Tensor] = []

        def shift(step: float, name: str = name, directions: list[Tensor] = directions) -> Tensor:
            def offset(layer: str, number: int, output: Tensor) -> Tensor:
                if layer != name:
                    return torch.zeros_like(output)
                if len(directions) <= number:
                    generator = torch.Generator().manual_seed(number)
                    directions.append(torch.randn(output.shape, generator=generator, dtype=output.dtype))
                return step * directions[number]

            return forward_with_offsets(case, plain(model), sample, offset)[0].detach().reshape(-1)

        step = 1e-5
        measured = (shift(step) - shift(-step)) / (2 * step)
        direction = torch.cat([as_positions(module, part) for part in directions])
        predicted = (analytic[name][0] * direction).flatten(1).sum(1)
        assert torch.allclose(measured, predicted, rtol=1e-6, atol=1e-8)


def test_jacobian_of_an_mlp_by_finite_differences_of_its_tail() -> None:
    """The same without any hook: the layers after the first, as a function of its pre-activations."""
    case = BY_NAME["mlp-tanh-bias"]
    model, _ = perturbed(case)
    x, _ = case.batch()
    covariance = torch.zeros(6, 6, dtype=torch.float64)
    with torch.no_grad():
        for h in model[0](x):
            columns = []
            for i in range(6):
                step = torch.zeros(6, dtype=torch.float64)
                step[i] = 1e-5
                columns.append((model[1:](h + step) - model[1:](h - step)) / 2e-5)
            jacobian = torch.stack(columns, dim=1)
            covariance += jacobian.T @ jacobian / len(x)
    assert close(reference(case, model)["0"]["K"][0], covariance, 1e-8)


def test_agop_of_a_first_layer_is_the_input_gradient_unless_there_is_a_skip() -> None:
    plain_case, skip_case = BY_NAME["mlp-tanh-bias"], BY_NAME["residual-mlp"]
    model, _ = perturbed(plain_case)
    total = egop_reference(model, plain_case.batch()[0])
    assert close(reference(plain_case, model)["0"]["agop"][0], total)
    model, _ = perturbed(skip_case)
    total = egop_reference(model, skip_case.batch()[0])
    assert not close(reference(skip_case, model)["fc1"]["agop"][0], total, 0.1)


def patches(module: nn.Module, x: Tensor) -> Tensor:
    """The inputs of a layer for one sample as (positions, groups, k_in), a convolution's cut one by one."""
    if not isinstance(module, CONVOLUTIONS):
        return x.reshape(-1, 1, x.shape[-1])
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    # torch keeps the amounts in F.pad's order, resolved for "same" too
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)[0]
    geometry = list(zip(x.shape[1:], module.kernel_size, module.stride, module.dilation, strict=True))
    starts = [range(0, size - dilation * (kernel - 1), stride) for size, kernel, stride, dilation in geometry]
    cut = []
    for start in itertools.product(*starts):
        window = (slice(s, s + d * (k - 1) + 1, d) for s, (_, k, _, d) in zip(start, geometry, strict=True))
        cut.append(x[(slice(None), *window)].reshape(module.groups, -1))
    return torch.stack(cut)


@every_case
def test_a_layer_is_its_matrix(case: Case) -> None:
    """h = W x + b at every position of every call, and the loss's gradient by W is the sum of g x^T."""
    model, _ = perturbed(case)
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in case.layers}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: seen[name].append((inputs[0].clone(), output.clone()))

    total = dict.fromkeys(case.layers, 0.0)
    by_output, by_weight = loss_gradients(case, model)
    for number, sample in enumerate(samples(case.batch())):
        copied = plain(model)
        for name in case.layers:
            seen[name].clear()
            copied.get_submodule(name).register_forward_hook(record(name))
        with torch.no_grad():
            call(case, copied, sample)
        for name in case.layers:
            module = copied.get_submodule(name)
            weight = as_matrix(module, module.weight.detach())
            x = torch.cat([patches(module, given) for given, _ in seen[name]])
            h = torch.cat([as_positions(module, output) for _, output in seen[name]])
            bias = 0 if module.bias is None else module.bias.detach().reshape(len(weight), -1)
            assert close(torch.einsum("gij,pgj->pgi", weight, x) + bias, h), name
            total[name] = total[name] + torch.einsum("pgi,pgj->gij", by_output[name][number][0], x)
    for name in case.layers:
        if case.name not in ("tied-layers", "tied-embedding") and name != "lm_head":
            assert close(torch.stack(by_weight[name]).sum(0), total[name]), name


@every_case
def test_weight_gradient_is_that_of_the_batch_loss(case: Case) -> None:
    """The total gradient of back-propagation, ties and all, where the parameter itself is the weight."""
    model, _ = perturbed(case)
    _, by_weight = loss_gradients(case, model)
    copied = plain(model)
    if case.name == "input-changed-in-place":
        # autograd refuses the gradient of a weight whose saved input was changed
        model.forward = lambda x: model.head(torch.tanh((h := model.inp(x)) + torch.tanh(model.fc(h))))
    model.requires_grad_(True)
    case.loss(call(case, model, case.batch()), target(case.batch())).sum().backward()
    for name, path in case.layers.items():
        weight = read(model, path)
        if not weight.is_leaf:
            continue  # a parametrized weight: see the test of its chain rule
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        expected = as_matrix(copied.get_submodule(name), part_of(name, path, grad))
        assert close(torch.stack(by_weight[name]).sum(0), expected, 1e-11), name


def test_loss_reduction_scales_the_gradient_and_nothing_else() -> None:
    case = BY_NAME["mlp-tanh-bias"]
    model, _ = perturbed(case)
    mean = reference(case, model, weight_decay=0.1)["0"]
    total = reference(case, model, weight_decay=0.1, loss_reduction="sum")["0"]
    assert close(total["dW"], 6 * mean["dW"])
    assert close(total["fact"], 6 * mean["fact"])
    assert torch.equal(total["enfa"], mean["enfa"])
    with pytest.raises(ValueError, match="median"):
        reference(case, model, weight_decay=0.1, loss_reduction="median")


def test_gradient_by_a_normalized_weight_obeys_the_chain_rule() -> None:
    """W = g v/|v| by rows: dL/dg is the row's gradient along v/|v|."""
    case = BY_NAME["weight-norm"]
    model, _ = perturbed(case)
    case.loss(call(case, model, case.batch()), target(case.batch())).mean().backward()
    for name, values in reference(case, model, weight_decay=0.1).items():
        originals = model.get_submodule(name).parametrizations.weight
        magnitude, direction = originals.original0, originals.original1.detach()
        unit = direction / direction.norm(dim=1, keepdim=True)
        assert close(values["W"][0], magnitude.detach() * unit)
        assert close((values["dW"][0] * unit).sum(1, keepdim=True), magnitude.grad)


# --- formulas -------------------------------------------------------------------------------------


@every_case
def test_formulas_of_section_one(case: Case) -> None:
    model, initial = perturbed(case)
    decay = 0.02
    for name, v in reference(case, model, initial, weight_decay=decay).items():
        w, w0, k, kb = v["W"], v["W0"], v["K"], v["Kb"]
        wt, moved = w.transpose(1, 2), w - w0
        assert close(v["agop"], wt @ k @ w), name
        assert close(v["enfa"], wt @ v["benfa"] @ w), name
        assert close(v["agop_sqrt"] @ v["agop_sqrt"], v["agop"]), name
        assert close(v["bagop_sqrt"] @ v["bagop_sqrt"], k), name
        assert close(v["enfa_sqrt"] @ v["enfa_sqrt"], v["enfa"]), name
        for fact in ("fact", "bfact"):
            symmetric = v[f"{fact}_symmetric"]
            assert close(symmetric @ symmetric, v[fact] @ v[fact].transpose(1, 2)), name
            assert close(symmetric, symmetric.transpose(1, 2)), name
        assert (
            math.isclose(
                v["fact"].diagonal(dim1=1, dim2=2).sum(),
                v["bfact"].diagonal(dim1=1, dim2=2).sum(),
                rel_tol=1e-9,
            )
            or norm(v["fact"]) == 0
        )
        assert v["nfc"] == v["cos_agop"] or math.isnan(v["nfc"])

        change = float((moved**2).sum() ** 0.5)
        assert v["weight_change"] == pytest.approx(change / float((w0**2).sum() ** 0.5), rel=1e-12)
        assert v["weight_change_relative"] == pytest.approx(change / float((w**2).sum() ** 0.5), rel=1e-12)
        stationary = (v["dW"] / decay + w).norm() / w.norm()
        assert v["relgrad"] == pytest.approx(float(stationary), rel=1e-12)

        def trace(a: Tensor) -> float:
            return float(a.diagonal(dim1=1, dim2=2).sum())

        def small_side(a: Tensor, k: Tensor) -> float:
            """cos(V^T V, V^T K V) from A = V V^T alone."""
            return trace(a @ a @ k) / trace(a @ a) ** 0.5 / trace(a @ k @ a @ k) ** 0.5

        # <F, G> = tr(A^2 K), |F|^2 = tr(A^2), |G|^2 = tr((A K)^2)
        a, b, c = w @ wt, moved @ moved.transpose(1, 2), w0 @ w0.transpose(1, 2)
        if norm(k):
            assert math.isclose(v["nfc"], small_side(a, k), rel_tol=1e-11)
            assert math.isclose(v["centered_nfc"], small_side(b, k), rel_tol=1e-11)
            assert math.isclose(v["cos_enfa"], small_side(a, v["benfa"]), rel_tol=1e-11)
            assert math.isclose(v["centered_ratio"], trace(b @ b @ k) / trace(a @ a @ k), rel_tol=1e-11)
        if norm(kb):
            assert norm(kb) > 1e-12 * norm(k)  # really moved, no rounding
            assert math.isclose(v["double_centered_nfc"], small_side(b, kb), rel_tol=1e-11)
            assert math.isclose(v["ptk_centered_nfc"], small_side(c, kb), rel_tol=1e-11)
            expected = trace(b @ b @ kb) / trace(b @ b @ k)
            assert math.isclose(v["double_centered_ratio"], expected, rel_tol=1e-11)
        else:
            assert math.isnan(v["double_centered_nfc"])
            assert math.isnan(v["ptk_centered_nfc"])


def test_correlations_of_an_ungrouped_layer_by_torch() -> None:
    case = BY_NAME["mlp-tanh-bias"]
    model, _ = perturbed(case)
    v = reference(case, model, weight_decay=0.1)["2"]

    def by_torch(a: Tensor, b: Tensor) -> tuple[float, float]:
        a, b = a.flatten(), b.flatten()
        return F.cosine_similarity(a, b, dim=0).item(), torch.corrcoef(torch.stack([a, b]))[0, 1].item()

    for names, against in ((FORWARD, v["W"].mT @ v["W"]), (BACKWARD, v["W"] @ v["W"].mT)):
        for name in names:
            assert (v[f"cos_{name}"], v[f"pearson_{name}"]) == pytest.approx(by_torch(v[name], against), rel=1e-11)
    assert (v["nfc"], v["nfc_pearson"]) == pytest.approx(by_torch(v["nfm"], v["agop"]), rel=1e-11)
    diagonals = by_torch(v["nfm"][0].diag(), v["agop"][0].diag())
    assert (v["nfc_diagonal"], v["nfc_pearson_diagonal"]) == pytest.approx(diagonals, rel=1e-11)


@every_case
def test_nothing_has_moved_from_itself(case: Case) -> None:
    initial = case.make()
    for v in reference(case, initial, initial).values():
        assert v["weight_change"] == v["weight_change_relative"] == 0
        assert norm(v["Kb"]) == 0
        assert math.isnan(v["centered_nfc"])
        assert math.isnan(v["double_centered_ratio"])


def test_a_discarded_layer_has_no_correlation() -> None:
    case = BY_NAME["discarded-layer"]
    model, initial = perturbed(case)
    v = reference(case, model, initial, weight_decay=0.1)["unused"]
    assert v["J"][0].shape == (2, 1, 1, 3)
    assert norm(v["K"]) == norm(v["fact"]) == 0
    assert all(math.isnan(v[key]) for key in ("nfc", "centered_nfc", "centered_ratio", "cos_fact", "cos_enfa"))
    assert v["relgrad"] == pytest.approx(1)
    assert v["weight_change"] > 0


def test_calls_of_one_module_are_positions() -> None:
    case = BY_NAME["reused-module"]
    model, _ = perturbed(case)
    assert reference(case, model)["cell"]["J"][0].shape == (2, 3, 1, 4)


def test_ties_are_counted_in_full() -> None:
    """Both layers of a tie have the whole gradient; the head's own share is another number."""
    values = {}
    for name in ("tied-layers", "tied-embedding"):
        case = BY_NAME[name]
        values[name] = reference(case, perturbed(case)[0], weight_decay=0.1)
    assert torch.equal(values["tied-layers"]["encoder"]["dW"], values["tied-layers"]["decoder"]["dW"])
    case = BY_NAME["tied-embedding"]
    untied, _ = perturbed(case)
    untied = copy.deepcopy(untied)
    untied.embed.weight = nn.Parameter(untied.embed.weight.detach().clone())
    alone = reference(case, untied, weight_decay=0.1)["head"]["dW"]
    assert not close(alone, values["tied-embedding"]["head"]["dW"], 0.05)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fact_is_the_nfm_at_a_minimum_of_the_decayed_loss(reduction: str) -> None:
    """Ridge regression in closed form fixes the sign, the lambda and the 1/n of FACT."""
    generator = torch.Generator().manual_seed(5)
    n, decay = 6, 0.3
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    case = Case(
        name="ridge",
        make=lambda: nn.Sequential(nn.Linear(4, 3, bias=False)).double().eval(),
        batch=lambda: (x, y),
        loss=lambda output, y: 0.5 * (output - y).pow(2).sum(1),
        layers={"0": "0.weight"},
        outputs=3,
    )
    model = case.make()
    samples_in_loss = n if reduction == "mean" else 1
    solution = torch.linalg.solve(x.T @ x + samples_in_loss * decay * torch.eye(4, dtype=torch.float64), x.T @ y)
    with torch.no_grad():
        model[0].weight.copy_(solution.T)
    v = reference(case, model, weight_decay=decay, loss_reduction=reduction)["0"]
    assert close(v["fact"], v["nfm"])
    assert close(v["bfact"], v["bnfm"])
    assert close(v["fact_symmetric"], v["nfm"])
    assert v["cos_fact"] == pytest.approx(1, abs=1e-12)
    assert v["relgrad"] < 1e-12


def test_correlations_on_paper() -> None:
    a = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.float64)
    b = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    assert cosine(a, b) == pytest.approx(5 / math.sqrt(30 * 2))
    assert pearson(a, b) == pytest.approx(0)
    assert cosine(a, -3 * a) == pytest.approx(-1)
    assert math.isnan(cosine(a, 0 * a))
    assert math.isnan(pearson(a, torch.ones_like(a)))


def test_egop_of_the_chain_monomial() -> None:
    """Diagonal 2, cyclic distance 2 gives 1, neighbors 0: exact over all signs, here r = 6."""
    r = 6
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * r)
    egop = egop_reference(lambda x: (x * x.roll(-1, dims=1)).sum(1), signs)
    expected = torch.zeros(r, r, dtype=torch.float64)
    for i in range(r):
        expected[i, i], expected[i, (i + 2) % r], expected[i, (i - 2) % r] = 2, 1, 1
    assert torch.equal(egop, expected)
