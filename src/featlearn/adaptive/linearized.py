"""Linearization of a network in its parameters, with fixed or adaptive tangent features, as a module to train.

References:
    LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
    https://arxiv.org/abs/2308.15478, sec. 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn._utils.validation import check_option
from featlearn.capture import Batch, Forward, check_parameters, copied
from featlearn.capture.parameter_jacobian import directional_derivative, needs_reverse
from featlearn.errors import InputError
from featlearn.layers import Layer, find_layers, tensors_behind, unwrap

_PREFIXES = ("_orig_mod.", "module.", "_orig_mod.")  # of wrappers, in the order in which they are removed


def linearize(
    model: nn.Module,
    at: nn.Module | Mapping[str, Tensor] | None = None,
    adaptive: bool = False,
    *,
    initial_outputs: bool = True,
    parameters: str | Iterable[str] | None = None,
    last_layer: str | None = "auto",
    forward: Forward | None = None,
) -> LinearizedModel:
    r"""Return the first-order expansion of a network in its parameters, as a module to train.

    It is ``f(x) = f_0(x) + <grad f_0(x), beta>`` with the network ``f_0`` at fixed parameters ``theta_0``. ``beta`` has
    one number per parameter and starts at zero. Any loss and any optimizer of torch can train it; with the squared loss
    and full-batch gradient descent it converges to `featlearn.LazyRegressor` with ridge 0.

    With ``adaptive=True`` the change of each weight matrix is a product ``M_out W M_in``: the tangent features are
    transformed while they are used (model A of the paper). ``M_out`` and ``M_in`` start at the identity and W at zero.
    They belong to linear layers, to each group of a convolution, to each projection of an attention and to each gate of
    a recurrent module. The last layer has no ``M_out``. Biases, gains, embeddings, and weights that are tied or
    parametrized change as without adaptation. Add ``mu * penalty()`` to the loss to keep the M near the identity.

    The network is a frozen copy in evaluation mode, also after ``train()``: without dropout, and with the running
    statistics of batch norm. The user's model is not changed.

    Time: forward and backward pass together take about twice as long as those of the network, and with adaptation
    ``k_out k_in (k_out + k_in)`` more per matrix, for any number of samples. Memory: at most one number per parameter
    and change, and the activations with their derivatives; no gradients of single samples. The matrices M of a
    convolution have ``(C_in * kernel size)^2`` and ``C_out^2`` entries.

    Args:
        model: Network to expand.
        at: Parameters ``theta_0``: a module of the same architecture, or a state_dict. None takes the present ones of
            the model.
        adaptive: Whether the changes of weight matrices are factorized.
        initial_outputs: Whether ``f_0(x)`` is added. Without it, the outputs start at exactly 0.
        parameters: Glob pattern of names of parameters that can change, or several. None includes all, also those that
            do not require gradients in the model.
        last_layer: Name of the layer that computes the outputs, as in `featlearn.probe`. "auto" is the last module with
            a single weight matrix, in the order in which modules were registered; None excludes no layer. Used if
            `adaptive` is true.
        forward: Function ``forward(network, batch)`` that returns the outputs, as in `featlearn.probe`. The result is
            then called with one batch. None passes all arguments on to the network; of a dict or dataclass that it
            returns, the logits are taken.

    Returns:
        Module with the same arguments as the network.

    Raises:
        InputError: An argument is invalid, `at` is of another architecture, or parameters are not finite.

    Example:
        >>> import torch
        >>> from featlearn.adaptive import linearize
        >>> network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> linear, X = linearize(network, initial_outputs=False), torch.eye(3)
        >>> linear(X).abs().max().item()
        0.0
        >>> optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        >>> for _ in range(500):
        ...     optimizer.zero_grad()
        ...     (linear(X) - torch.ones(3, 1)).square().mean().backward()
        ...     optimizer.step()
        >>> torch.allclose(linear(X), torch.ones(3, 1), atol=1e-2)
        True

    References:
        LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478, eq. 2 and model A.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if forward is not None and not callable(forward):
        raise InputError(f"forward must be a function, got {forward!r}.")
    check_parameters(unwrap(model))
    network = _network_at(unwrap(model), at).eval()
    check_parameters(network, "at")
    names = [name for name, p in network.named_parameters() if p.is_floating_point() or p.is_complex()]
    if parameters is not None:
        names = select_matching(parse_patterns(parameters, "parameters"), names, "parameters", "parameter")
    if not names:
        raise InputError("model must have a floating-point parameter, got none.")
    factors = _factors(network, set(names), last_layer) if adaptive else []
    return LinearizedModel(network, names, factors, initial_outputs, forward)


def _network_at(model: nn.Module, at: nn.Module | Mapping[str, Tensor] | None) -> nn.Module:
    """Return a copy of a model with the parameters and buffers of another one."""
    if at is not None and not isinstance(at, nn.Module | Mapping):
        raise InputError(f"at must be a module, a state_dict or None, got {type(at).__name__}.")
    network = copied(model)
    if at is not None:
        state = unwrap(at).state_dict() if isinstance(at, nn.Module) else dict(at)
        try:
            network.load_state_dict({_without_prefixes(name): value for name, value in state.items()})
        except RuntimeError as error:
            raise InputError(f"at must be of the architecture of the model: {error}") from error
    return network


def _without_prefixes(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class _Factor:
    """Weight matrix whose change is factorized.

    Attributes:
        layer: Name of the layer.
        parameter: Path of the parameter that holds the matrix.
        matrix: Function that returns the view ``(groups, k_out, k_in)`` of a tensor in the shape of the parameter.
        shape: Shape of that view.
        is_last: Whether the layer computes the outputs, so that there is no ``M_out``.
    """

    layer: str
    parameter: str
    matrix: Callable[[Tensor], Tensor]
    shape: tuple[int, int, int]
    is_last: bool


def _factors(network: nn.Module, names: set[str], last_layer: str | None) -> list[_Factor]:
    """Find the weight matrices that are parameters of their own."""
    layers = find_layers(network)
    check_option("last_layer", last_layer, ("auto", None, *(layer.name for layer in layers)))
    if last_layer == "auto":
        last_layer = layers[-1].name if layers and layers[-1].part is None else None
    paths = {id(p): path for path, p in network.named_parameters()}
    uses = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    return [
        _Factor(layer.name, paths[id(weight)], layer.matrix, layer.shape, layer.name == last_layer)
        for layer in layers
        if (weight := _weight(layer)) is not None and uses[id(weight)] == 1 and paths[id(weight)] in names
    ]


def _weight(layer: Layer) -> Tensor | None:
    """Return the weight of a layer if it is a real parameter, and not computed from others."""
    behind = tensors_behind(layer)
    single = len(behind) == 1 and behind[0] is layer.weight()
    return behind[0] if single and behind[0].is_floating_point() else None


def _child(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module that holds the last part of a path, and that part; missing modules are created."""
    *parents, name = path.split(".")
    for part in parents:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, name


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield each parameter and buffer once: its path, the tensor, and whether a state_dict holds it."""
    for path, p in module.named_parameters():
        yield path, p, True
    for path, b in module.named_buffers():
        parent, _, name = path.rpartition(".")
        yield path, b, name not in module.get_submodule(parent)._non_persistent_buffers_set


def _emptied(network: nn.Module) -> nn.Module:
    """Replace the tensors of a network by ones without values. Tied ones stay tied."""
    empty: dict[int, Any] = {}
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, t in tensors.items():
                if t is None:
                    continue
                if id(t) not in empty:
                    meta = torch.empty_like(t, device="meta", requires_grad=False)
                    # The original is kept as well: an id would be reused.
                    empty[id(t)] = t, nn.Parameter(meta, False) if isinstance(t, nn.Parameter) else meta
                tensors[name] = empty[id(t)][1]
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return network


def _call(network: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = arguments
    return network(*args, **kwargs)


class LinearizedModel(nn.Module):
    """First-order expansion of a network in its parameters, as `linearize` returns it.

    Attributes:
        initial: Parameters and buffers of the network, as buffers at the same paths.
        beta: Trainable changes at the paths of their parameters; with adaptation, the middle factor W of matrices.
        maps: Trainable matrices M of each layer: ``input`` of shape ``(groups, k_in, k_in)`` and ``output`` of shape
            ``(groups, k_out, k_out)``. Empty without adaptation.

    Args:
        network: Network in evaluation mode, which this module takes over.
        names: Names of the parameters that change.
        factors: Weight matrices whose change is factorized.
        initial_outputs: Whether the outputs of the network are added.
        forward: Function ``forward(network, batch)``, or None.
    """

    def __init__(
        self,
        network: nn.Module,
        names: Iterable[str],
        factors: Iterable[_Factor],
        initial_outputs: bool,
        forward: Forward | None,
    ) -> None:
        super().__init__()
        self.initial, self.beta, self.maps = nn.Module(), nn.Module(), nn.Module()
        tensors = dict.fromkeys(names)
        for path, t, stored in _named_tensors(network):
            parent, name = _child(self.initial, path)
            value = t.detach().clone(memory_format=torch.contiguous_format)
            parent.register_buffer(name, value, persistent=stored)
            if path in tensors:
                parent, name = _child(self.beta, path)
                parent.register_parameter(name, nn.Parameter(torch.zeros_like(value)))
        self._factors: dict[str, list[_Factor]] = {}
        for factor in factors:
            self._factors.setdefault(factor.parameter, []).append(factor)
            like = self.initial.get_buffer(factor.parameter)
            groups, k_out, k_in = factor.shape
            sides = {"input": k_in} if factor.is_last else {"input": k_in, "output": k_out}
            for side, k in sides.items():
                parent, name = _child(self.maps, f"{factor.layer}.{side}")
                eye = torch.eye(k, dtype=like.dtype, device=like.device).repeat(groups, 1, 1)
                parent.register_parameter(name, nn.Parameter(eye))
        self.initial_outputs = initial_outputs
        self._forward = forward
        # In a tuple, the network is not a submodule: its tensors have no values, and are replaced in each call.
        self._network = (_emptied(network),)
        self._reverse: bool | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs for the arguments of the network, or for one batch if there is a forward function.

        The first call compares the derivative along a random direction with a backward pass, to choose how to
        differentiate.

        Args:
            *args: Arguments of the network, or one batch.
            **kwargs: Keyword arguments of the network.

        Raises:
            InputError: The network does not return a tensor, or the forward function needs one batch.
            UnsupportedModelError: The network cannot be differentiated along a direction.
        """
        forward: Forward = _call
        batch = Batch((args, kwargs), None, None, None)
        if self._forward is not None:
            if len(args) != 1 or kwargs:
                raise InputError(
                    f"a module with forward= must be called with one batch, got {len(args)} arguments and "
                    f"{len(kwargs)} keywords."
                )
            batch, forward = Batch(args[0], None, None, None), self._forward
        (network,) = self._network
        values, change = dict(self.initial.named_buffers()), self.change()
        if self._reverse is None:
            self._reverse = needs_reverse(network, batch, forward, values, list(change))
        outputs, product = directional_derivative(network, batch, forward, values, change, self._reverse)
        return outputs + product if self.initial_outputs else product

    def change(self) -> dict[str, Tensor]:
        """Return the change of each parameter by name, with its graph: ``beta``, or ``M_out W M_in``."""
        return {name: self._change_of(name, beta) for name, beta in self.beta.named_parameters()}

    def penalty(self) -> Tensor:
        """Return ``sum |M - I|_F^2`` over the matrices M; zero without adaptation.

        References:
            LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478, model A with ``omega(v) = (v - 1)^2``.
        """
        total = next(self.beta.parameters()).new_zeros(())
        for m in self.maps.parameters():
            total = total + (m - torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)).square().sum()
        return total

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, which has no effect: the network stays in evaluation mode.

        Args:
            mode: Training mode of this module.
        """
        return super().train(mode)

    def extra_repr(self) -> str:
        """Return the class of the network, and the options."""
        kind = type(self._network[0]).__name__
        return f"{kind}, adaptive={bool(self._factors)}, initial_outputs={self.initial_outputs}"

    def _change_of(self, name: str, beta: Tensor) -> Tensor:
        factors = self._factors.get(name)
        if factors is None:
            return beta
        total = beta.clone(memory_format=torch.contiguous_format)
        for factor in factors:
            maps: Any = self.maps.get_submodule(factor.layer)
            product = factor.matrix(beta) @ maps.input
            product = product if factor.is_last else maps.output @ product
            factor.matrix(total).copy_(product)  # a view
        return total
