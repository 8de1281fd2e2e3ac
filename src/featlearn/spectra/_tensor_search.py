"""Search of a checkpoint for tensors, their names, and the entries that are not weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featlearn.spectra._container_entries import SEARCHED, entries_of, is_module, type_name
from featlearn.spectra._inert_pickle import Built
from featlearn.spectra._pickle_constructors import PickledArray
from featlearn.spectra._stored_tensor import StoredTensor, identity, tie, unusable
from featlearn.spectra._tensor_records import TensorRecord

_DEEPEST = 50  # levels of containers
_MOST_ROWS = 100  # rows about entries that are not tensors
# Keys of the one network of a checkpoint, which are not a part of the names of its tensors.
_WRAPPERS = frozenset(
    (
        *("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights", "params"),
        *("state", "ema", "checkpoint"),
    )
)
_OPTIMIZER = re.compile(r"optimi[sz]er|(?:^|_)optims?(?:$|_|\d)|scheduler|lr_sched|grad_?scaler|amp_?scaler", re.I)
_MOMENTS = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sqr_avg"),
        *("acc_delta", "exp_avg_slow", "exp_avg_diff", "exp_avg_sq_row", "exp_avg_sq_col"),
    )
)


@dataclass
class _Node:
    """Tensor, or container of tensors.

    Attributes:
        key: Key in the container above; empty for a level that has no name.
        leaf: The tensor; None for a container.
        note: Reason why a tensor is not a weight; otherwise empty.
        module: Whether the container is a module, whose structure is a part of the names.
        children: Tensors and containers of tensors inside.
        rest: Keys of the other entries, and their types.
        skipped: Reason why all tensors inside are not weights; otherwise empty.
        tensors: Number of tensors inside.
        matrices: Number of tensors inside with two or more dimensions.
        stored: Number of tensors inside, with those of optimizers.
        height: Number of levels of containers.
    """

    key: str
    leaf: Any = None
    note: str = ""
    module: bool = False
    children: list[_Node] = field(default_factory=list)
    rest: list[tuple[str, str]] = field(default_factory=list)
    skipped: str = ""
    tensors: int = 0
    matrices: int = 0
    stored: int = 0
    height: int = 0


@dataclass
class _Visits:
    """Containers that were visited.

    Attributes:
        nodes: Result of each container by id; None for one without tensors, or one that is being visited.
        spare: Number of tensors that may still get another name, because their container has several places.
    """

    nodes: dict[int, _Node | None] = field(default_factory=dict)
    spare: int = 20_000


def find_tensors(roots: Sequence[tuple[str, Any]]) -> list[StoredTensor]:
    """Find all tensors in nested dicts, lists and objects.

    The names are the keys on the way, joined by dots. The keys above the tensors of a single network are left out, and
    those of several networks remain, as in "generator.conv1.weight".

    Args:
        roots: Objects of a checkpoint, each with the name that its tensors start with.

    Returns:
        The tensors, those with several names once. Optimizer states and entries that are not tensors have a reason, a
        shape of () and an empty dtype. The list is empty if there is no tensor but those of optimizers.

    Raises:
        DamagedError: If a tensor reaches beyond its storage.
    """
    visits = _Visits()
    trees = [tree for name, value in roots if (tree := _tree(name, value, visits, 0)) is not None]
    if not any(tree.tensors for tree in trees):
        return []
    if len(trees) > 1 or trees[0].leaf is not None or trees[0].key:
        root = _Node(
            "", module=True, children=[replace(t, key=t.key or "tensor") if t.leaf is not None else t for t in trees]
        )
    else:
        root = trees[0]
    found = list(_named(root, _wrappers(root)))
    if len({name for name, node in found if not isinstance(node, str)}) < sum(not isinstance(n, str) for _, n in found):
        found = list(_named(root, frozenset()))
    return _described(found)


def _tree(key: str, value: Any, visits: _Visits, depth: int) -> _Node | None:
    """Return the tensors inside of an object; None if there are none."""
    if isinstance(value, PickledArray):
        value = value.record or value.values
        value = value[0] if isinstance(value, list) and len(value) == 1 else value  # one object, as from numpy.save
    if isinstance(value, Tensor | TensorRecord | np.ndarray | StoredTensor):
        return _Node(key, value, tensors=1, matrices=int(len(value.shape) > 1), stored=1)
    if not isinstance(value, SEARCHED) or depth > _DEEPEST:
        return None
    if id(value) in visits.nodes:
        # Hostile files contain cycles, or one list a billion times.
        known = visits.nodes[id(value)]
        if known is None or known.stored > visits.spare or depth + known.height > _DEEPEST:
            return None
        visits.spare -= known.stored
        return replace(known, key=key)
    visits.nodes[id(value)] = None
    visits.nodes[id(value)] = node = _container(key, value, visits, depth)
    return node


def _container(key: str, value: Any, visits: _Visits, depth: int) -> _Node | None:
    node = _Node(key, module=is_module(value))
    entries = entries_of(value)
    for local, child, note in entries:
        inside = _tree(local, child, visits, depth + 1)
        if inside is not None:
            node.children.append(replace(inside, note=inside.note or note))
        elif not isinstance(value, list | tuple) and local != "_metadata" and len(node.rest) <= _MOST_ROWS:
            # The metadata of state_dict() are versions of modules.
            node.rest.append((local, type_name(child)))
    if not node.children:
        return None
    node.stored = sum(child.stored for child in node.children)
    node.tensors = sum(child.tensors for child in node.children)
    node.matrices = sum(child.matrices for child in node.children)
    node.height = 1 + max(child.height for child in node.children)
    keys = {local for local, _, _ in entries}
    name = value.name if isinstance(value, Built) else ""
    if not node.module and (_is_optimizer(key, name, keys, node) or not node.tensors):
        tensors = f"{node.stored} tensor{'s' * (node.stored != 1)}"
        return _Node(key, skipped=f"optimizer state with {tensors}, not weights", stored=node.stored)
    return node


def _is_optimizer(key: str, name: str, keys: set[str], node: _Node) -> bool:
    if name.startswith("torch.optim.") or {"state", "param_groups"} <= keys or keys & _MOMENTS:
        return True
    return bool(_OPTIMIZER.search(key)) and not any(_is_weight(leaf) for leaf in _leaf_keys(node))


def _is_weight(key: str) -> bool:
    return key.endswith(("weight", "kernel"))


def _leaf_keys(node: _Node) -> Iterator[str]:
    for child in node.children:
        if child.leaf is not None:
            yield child.key
        yield from _leaf_keys(child)


def _wrappers(root: _Node) -> frozenset[int]:
    """Return the containers whose keys are not a part of names, because they contain the only network."""
    result: set[int] = set()
    chain: list[_Node] = []
    node = root
    while not node.module and not any(child.leaf is not None and "." in child.key for child in node.children):
        inside = [child for child in node.children if child.children and child.matrices]
        if len(inside) != 1:
            break
        node = inside[0]
        chain.append(node)
        dotted = any(child.leaf is not None and "." in child.key for child in node.children)
        if node.module or dotted or node.key.lower() in _WRAPPERS:
            result |= {id(outer) for outer in chain}
    for below in _containers(node):
        # As in {"generator": {"state_dict": ...}}: the key adds nothing to that of the network.
        if "state_dict" in below.key.lower() or below.key == "model_state":
            result.add(id(below))
    return frozenset(result)


def _containers(node: _Node) -> Iterator[_Node]:
    for child in node.children:
        if child.children and not child.module:
            yield child
            yield from _containers(child)


def _named(node: _Node, hidden: frozenset[int], prefix: str = "") -> Iterator[tuple[str, _Node | str]]:
    """Yield names with tensors, or with the reason why an entry contains none."""
    keys = [child.key for child in node.children if child.leaf is not None]
    # The prefix of a data-parallel wrapper, if all tensors of a state dict have it.
    wrapped = bool(keys) and not node.module and all(key.startswith("module.") for key in keys)
    for child in node.children:
        key = child.key.removeprefix("module.") if wrapped else child.key
        name = prefix if id(child) in hidden or not key else f"{prefix}.{key}" if prefix else key
        if child.leaf is not None or child.skipped:
            yield name, child
        else:
            yield from _named(child, hidden, name)
    for key, kind in () if node.module or not node.matrices else node.rest:
        yield f"{prefix}.{key}" if prefix else key, f"not a tensor but {kind}"


def _described(found: Iterable[tuple[str, _Node | str]]) -> list[StoredTensor]:
    tensors: list[StoredTensor] = []
    keys: dict[str, Any] = {}
    others: list[StoredTensor] = []
    counts: Counter[str] = Counter()
    for path, node in found:
        if not isinstance(node, str):
            counts[path] += 1  # the paths of {"a.b": ..., "a": {"b": ...}} are equal
        name = path if counts[path] < 2 else f"{path}#{counts[path]}"
        if isinstance(node, str) or node.skipped:
            reason = node if isinstance(node, str) else node.skipped
            others.append(StoredTensor(name, (), "", Tensor, reason=reason))
            continue
        tensor, keys[name] = _stored(name, node.leaf)
        tensors.append(replace(tensor, reason=tensor.reason or optimizer_reason(name) or node.note))
    if len(others) > _MOST_ROWS:
        reason = f"not tensors: {len(others) - _MOST_ROWS} more entries"
        others = [*others[:_MOST_ROWS], StoredTensor("...", (), "", Tensor, reason=reason)]
    return [*tie(tensors, keys), *others]


def optimizer_reason(name: str) -> str:
    """Return the reason why a tensor of this name is not a weight, as "fc.weight.exp_avg"; empty if it can be one.

    Args:
        name: Name of the tensor.

    Returns:
        The reason.
    """
    return "optimizer state, not a weight" if name.rpartition(".")[2] in _MOMENTS else ""


def _stored(name: str, leaf: Any) -> tuple[StoredTensor, Any]:
    """Return a tensor and the key that is equal for its other names."""
    if isinstance(leaf, StoredTensor):
        return replace(leaf, name=name), None
    if isinstance(leaf, TensorRecord):
        return StoredTensor(name, leaf.shape, leaf.dtype, leaf.read, reason=leaf.problem()), leaf.identity
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind not in "fiub" or leaf.dtype.itemsize > 8:
            return StoredTensor(name, leaf.shape, str(leaf.dtype), Tensor, reason="not a plain array"), None
        leaf = torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("=")))
    dtype = str(leaf.dtype).removeprefix("torch.")
    return StoredTensor(name, tuple(leaf.shape), dtype, leaf.detach, reason=unusable(leaf)), identity(leaf)
