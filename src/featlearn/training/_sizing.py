"""Sizes of measurements that a budget of time allows: rows, random output vectors, layers and parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from featlearn.training._plan import MeasurementPlan
from featlearn.training._prices import FREE, Level, Part, Passes, Price, Turns
from featlearn.training._work import Work

_FEWEST_ROWS = 8
_VECTORS = (1, 4)  # random output vectors of feature matrices; more rows are worth more than more vectors
_FEWEST_KERNEL_ROWS, _FEWEST_KERNEL_VECTORS = 8, 4
_MORE_KERNEL_VECTORS = 32  # rows from which on all output vectors are taken
_FEATURES = 0.6  # share of the time for feature matrices; the other parts take turns in the rest
_UNNOTICED = 0.01  # seconds that the first measurement may take, and a part at steps that were asked for
_CAUTION = {"weights": 2.0, "ck": 4.0, "ntk": 4.0}  # time of a part that was never measured, over its guess
_FIRST = 2.0  # training steps that the first measurement may take; the estimate can be wrong by half
_RATED_ROWS = 16
_ASSUMED_BATCH = 32  # rows of a training step before one is timed, if the data does not come in batches

# Time of a part without any operations, in seconds: of a measurement and of each layer.
_OVERHEAD = {"features": (3e-3, 5e-4), "weights": (2e-3, 7e-4), "ck": (1e-3, 6e-4), "ntk": (4e-3, 2e-3)}
_NUMBERS = (1.5e-3, 1e-10)  # time of the numbers of a layer, and of an operation in double precision
_TURN = {"weights": 0, "ck": 1, "ntk": 2}


class Sizing:
    """Sizes of the measurements of one model within a budget of time.

    A measurement always has feature matrices if they are requested: of all layers, or of layers in turn if there is no
    time for all of them. Spectra of weights, conjugate kernels and the tangent kernel take turns: the part that was not
    measured for longest is next, as soon as there is time for it. Prices come from timed passes at first, and from
    measurements later.

    Args:
        full: Largest measurement that memory allows.
        work: Operations of its parts.
        passes: Time of forward and backward passes.
        batch: Rows of a training step, None if not known.
    """

    def __init__(self, full: MeasurementPlan, work: Work, passes: Passes, batch: int | None) -> None:
        self._full = full
        self._measure = {both: work.measure(both) for both in (True, False)}
        self.step = passes.of(batch or _ASSUMED_BATCH)
        timed = min(_RATED_ROWS, work.samples)
        rate = passes.of(timed) / max(work.passes(timed, 3.0), 1.0)
        number = len(work.layers)
        self._parts: dict[str, Part] = {}
        self._numbers, self._spectra = Turns({}, 0.0), Turns({}, 0.0)
        if "features" in full.parts:
            levels = _feature_levels(full, work, passes.whole)
            self._parts["features"] = Part(levels, _feature_price(levels, work, passes, rate))
            costs = work.layer_costs(levels[0].outputs, levels[0].rows, both=False)
            guess = {name: _NUMBERS[0] + _NUMBERS[1] * cost.numbers for name, cost in costs.items()}
            self._numbers = Turns(guess, 0.0)
        for part in ("ck", "ntk"):
            if part in full.parts:
                levels = _kernel_levels(full, work, part, passes.whole)
                fixed = _OVERHEAD[part][0] + number * _OVERHEAD[part][1]
                prices = {level: fixed + rate * work.cost(part, level.outputs, level.rows)[0] for level in levels}
                self._parts[part] = Part(levels, Price(prices, _CAUTION[part]))
        if "weights" in full.parts:
            fixed, per_layer = _OVERHEAD["weights"]
            spectra = {name: per_layer + rate * work.spectrum(name)[0] for name in full.spectra}
            self._spectra = Turns(spectra, fixed, at_first=2.0, caution=_CAUTION["weights"])
        self._measured: dict[str, int] = {}  # last measurement of each part
        self._count = 0

    def trial(self) -> MeasurementPlan | None:
        """Return the smallest measurement of feature matrices, of one layer; None if they are not requested."""
        if "features" not in self._parts:
            return None
        plan = self._with(replace(self._full, sized=True), "features", 0)
        return self._of_layers(plan, self._numbers.affordable(self._numbers.next_cost()))

    def first(self, complete: bool) -> MeasurementPlan:
        """Return the first measurement, which takes about two training steps, or the smallest one.

        Args:
            complete: Whether to measure all parts.
        """
        for limit in (max(_FIRST * self.step, _UNNOTICED), FREE * self.least):
            plan = self.fitted(limit, limit, complete)
            if plan is None:
                continue
            if limit > _FIRST * self.step and not complete and "features" in plan.parts:
                return replace(plan, parts=frozenset({"features"}), spectra=frozenset())  # too long already
            return plan
        return self._full

    @property
    def least(self) -> float:
        """Time of the smallest measurement that is worth making, in seconds."""
        if (features := self._parts.get("features")) is not None:
            # Numbers of too few layers would not be worth the pass.
            passed, all_layers = features.cost(0, initial=False), self._numbers.cost(self._numbers.names)
            return passed + min(all_layers, max(passed, self._numbers.next_cost()))
        costs = [part.cost(0, initial=True) for part in self._parts.values()]
        return min([*costs, self._spectra.next_cost()] if self._spectra.names else costs, default=0.0)

    def fitted(self, limit: float, income: float, complete: bool = False) -> MeasurementPlan | None:
        """Return the measurement that fits into a time, None if not even the smallest one does.

        Args:
            limit: Maximum time in seconds.
            income: Time that is available since the last measurement, in seconds. The sizes of the parts follow it,
                so that parts which are too long for it can be saved up for.
            complete: Whether to measure all parts and layers, in their smallest size if they do not fit.
        """
        plan, left = replace(self._full, parts=frozenset(), spectra=frozenset(), notes=(), sized=True), limit
        share = income
        if "features" in self._parts:
            share = (1 - _FEATURES) * income
            fitted = self._fitted_features(plan, left, _FEATURES * income, complete)
            if fitted is None:
                return None
            plan, left = fitted[0], left - fitted[1]
        queue = sorted(self._full.parts - {"features"}, key=lambda part: (self._measured.get(part, -1), _TURN[part]))
        for part in queue:
            if part == "weights":
                names = list(self._spectra.names) if complete else self._spectra.affordable(left)
                if names:
                    plan = replace(plan, parts=plan.parts | {part}, spectra=frozenset(names))
                    left -= self._spectra.cost(names)
            elif (index := self._level(part, share, left, complete)) is not None:
                plan = self._with(plan, part, index)
                left -= self._parts[part].cost(index, initial=True)
            if part not in plan.parts:
                break  # the time is kept until it suffices
        return plan if plan.parts else None

    def _fitted_features(
        self, plan: MeasurementPlan, limit: float, share: float, complete: bool
    ) -> tuple[MeasurementPlan, float] | None:
        """Return a plan with feature matrices that fit into a time, and their time; None if there is not enough."""
        sizes, all_layers = self._parts["features"], self._numbers.cost(self._numbers.names)
        smallest = sizes.cost(0, initial=False)
        if complete or smallest + all_layers <= limit:
            index = self._level("features", share - all_layers, limit - all_layers, complete) or 0
            return self._with(plan, "features", index), sizes.cost(index, initial=False) + all_layers
        names = self._numbers.affordable(limit - smallest)
        if not names:
            return None
        return self._of_layers(self._with(plan, "features", 0), names), smallest + self._numbers.cost(names)

    def _level(self, part: str, share: float, limit: float, complete: bool) -> int | None:
        """Return the index of the largest size of a part within a time, None if there is none."""
        sizes, initial = self._parts[part], part != "features"
        index = sizes.largest(share, limit, initial)
        return max(index or 0, sizes.largest(_UNNOTICED, math.inf, initial) or 0) if complete else index

    def learn(self, plan: MeasurementPlan, seconds: Mapping[str, float]) -> None:
        """Correct the prices by the times of the parts of a measurement, in seconds."""
        self._count += 1
        self._measured |= dict.fromkeys(plan.parts & seconds.keys(), self._count)
        for name, part in self._parts.items():
            level = level_of(plan, name)
            # The size may be another one that was asked for.
            if name in plan.parts and name in seconds and level in part.price.guess:
                both = name != "features" and level != part.started
                part.price.learn(level, seconds[name] / (2.0 if both else 1.0))
                part.at, part.started = part.levels.index(level), level
        if "numbers" in seconds:
            self.learn_numbers(plan, seconds["numbers"])
        if "weights" in plan.parts and "weights" in seconds:
            self._spectra.learn(plan.spectra & set(self._spectra.names), seconds["weights"])

    def learn_numbers(self, plan: MeasurementPlan, seconds: float, *, turn: bool = True) -> None:
        """Correct the price of numbers by the time that those of a measurement took, in seconds.

        Args:
            plan: Plan of the measurement.
            seconds: Time in seconds.
            turn: Whether the numbers are recorded.
        """
        self._numbers.learn([name for name in self._numbers.names if name not in plan.omitted], seconds, turn)

    def _of_layers(self, plan: MeasurementPlan, names: Sequence[str]) -> MeasurementPlan:
        return replace(plan, omitted=frozenset(self._numbers.names) - set(names))

    def _with(self, plan: MeasurementPlan, part: str, index: int) -> MeasurementPlan:
        outputs, rows, both = self._parts[part].levels[index]
        changes: dict[str, Any] = {"parts": plan.parts | {part}}
        if part == "features":
            changes |= {"outputs": outputs, "feature_rows": rows, "measure": self._measure[both]}
        elif part == "ck":
            changes |= {"ck_rows": rows}
        else:
            changes |= {"ntk_rows": rows, "sketches": None if outputs == "exact" else outputs}
        return replace(plan, **changes)


def describe_size(plan: MeasurementPlan, full: MeasurementPlan, layers: int) -> str:
    """Return the size of a measurement as text, such as ``features: 8 of 512 rows, 4 random outputs; no ntk``.

    Args:
        plan: Plan of the measurement.
        full: Largest plan.
        layers: Number of layers.
    """
    texts = []
    if "features" in plan.parts and level_of(plan, "features") != level_of(full, "features"):
        by = f", {plan.outputs} random output vectors" if plan.outputs != full.outputs else ""
        by += ", without the initial model" if full.measure is None and plan.measure is not None else ""
        texts.append(f"features: {plan.feature_rows} of {full.feature_rows} rows{by}")
    if "features" in plan.parts and plan.omitted:
        texts.append(f"features: {layers - len(plan.omitted)} of {layers} layers")
    if "weights" in plan.parts and plan.spectra != full.spectra:
        texts.append(f"weights: {len(plan.spectra)} of {len(full.spectra)} spectra")
    if "ck" in plan.parts and plan.ck_rows != full.ck_rows:
        texts.append(f"ck: {plan.ck_rows} of {full.ck_rows} rows")
    if "ntk" in plan.parts and level_of(plan, "ntk") != level_of(full, "ntk"):
        by = f", {plan.sketches} random output vectors" if plan.sketches != full.sketches else ""
        texts.append(f"ntk: {plan.ntk_rows} of {full.ntk_rows} rows{by}")
    texts += [f"no {part}" for part in ("features", "weights", "ck", "ntk") if part in full.parts - plan.parts]
    return "; ".join(texts)


def level_of(plan: MeasurementPlan, part: str) -> Level:
    """Return the size of the part "features", "ck" or "ntk" in a plan."""
    if part == "features":
        return Level(plan.outputs, plan.feature_rows, plan.measure is None)
    if part == "ck":
        return Level("exact", plan.ck_rows)
    return Level("exact" if plan.sketches is None else plan.sketches, plan.ntk_rows)


def _doublings(fewest: int, most: int) -> list[int]:
    """Return numbers of rows, each twice the one before, up to the largest."""
    rows = [min(fewest, most)]
    while rows[-1] < most:
        rows.append(min(2 * rows[-1], most))
    return rows


def _feature_levels(full: MeasurementPlan, work: Work, whole: bool) -> list[Level]:
    """Return the sizes for feature matrices: more rows, then more output vectors, then the initial model too."""
    fixed = whole or (work.sharing is not None and not work.sharing.alone)
    rows = [full.feature_rows] if fixed else _doublings(_FEWEST_ROWS, full.feature_rows)
    fewer = [n for n in _VECTORS if work.options["outputs"] == "auto" and n < work.vectors(full.outputs)]
    first: list[str | int] = [*fewer[:1], full.outputs]
    levels = [Level(first[0], n, False) for n in rows]
    levels += [Level(outputs, full.feature_rows, False) for outputs in [*fewer[1:], full.outputs]]
    return [*dict.fromkeys(levels), Level(full.outputs, full.feature_rows)]


def _kernel_levels(full: MeasurementPlan, work: Work, part: str, whole: bool) -> list[Level]:
    most = full.ck_rows if part == "ck" else full.ntk_rows
    rows = [most] if whole else _doublings(_FEWEST_KERNEL_ROWS, most)
    outputs: str | int = "exact" if part == "ck" or full.sketches is None else full.sketches
    fewer = part == "ntk" and work.vectors(outputs) > _FEWEST_KERNEL_VECTORS
    more = _MORE_KERNEL_VECTORS
    levels = [Level(_FEWEST_KERNEL_VECTORS, n) for n in rows if n <= max(more, rows[0])] if fewer else []
    return levels + [Level(outputs, n) for n in rows if not fewer or n >= min(more, rows[-1])]


def _feature_price(levels: Sequence[Level], work: Work, passes: Passes, rate: float) -> Price:
    """Return the price of feature matrices: passes of the models, and sums of products."""
    fixed, per_layer = _OVERHEAD["features"]
    guess = {}
    for of_both in (False, True):
        chosen = [level for level in levels if level.both == of_both]
        if not chosen:
            continue
        # Operations beside the passes are linear in the products that are summed: two sizes suffice.
        few, many = chosen[0], chosen[-1]
        products = {level: level.rows * work.vectors(level.outputs) for level in chosen}
        least, most = (sum(cost.sums for cost in work.layer_costs(*level).values()) for level in (few, many))
        slope = max(most - least, 0.0) / max(products[many] - products[few], 1)
        models = 2.0 if of_both else 1.0
        for level in chosen:
            seconds = fixed + per_layer * len(work.layers) + rate * (least + slope * (products[level] - products[few]))
            # A pass is timed forward and backward.
            seconds += models * (1 + work.vectors(level.outputs)) / 2.0 * passes.of(level.rows)
            if work.sharing is not None:
                seconds += models * products[level] * work.sharing.seconds
            guess[level] = seconds
    return Price(guess)
