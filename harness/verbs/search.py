"""Look for a combination of strategies that fits, where there are too many to predict them all.

Greedily, and lazily: what a strategy saves on top of others is mostly less than what it saves alone (Minoux,
"Accelerated greedy algorithms for maximizing submodular set functions", 1978). So those that can save more than the
best of this step are predicted in it, and no others. Where that ends short of the limit, since what was added keeps out
others, it is done again without one of these (Harvey and Ginsberg, "Limited discrepancy search", 1995).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from harness.contract.plugins import Plugins
from harness.contract.strategy import DECLARED
from harness.records import Applied, Case
from harness.run.schedule import PREDICTING_SECONDS
from harness.verbs.combinations import case_of, divides, ordered
from harness.verbs.plan import PlanRow, taken

AT_ONCE = 6
"""Combinations that are predicted beside each other before it is seen whether one of them saves most."""
LEAST = 0.005
"""The share of what a combination takes that a strategy must save to be added to it."""
SHORT = 1.5
"""How many times its limit a combination may take that other ways are tried to, where none of its kind fits."""
SECONDS, SLOWER = 30.0, 2
"""How long a combination may take to be predicted, those that take longer are left out: in seconds, or so many times as
long as the baseline with the start of what predicts, where that is more."""
Combination = tuple[Applied, ...]
Predict = Callable[[Sequence[Case], float], list[PlanRow]]
"""Predict cases, each within so many seconds."""


class Patient:
    """Predict cases, the baseline first; for each of the others wait `seconds`, which follow from it."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self.seconds: float | None = None

    def __call__(self, cases: Sequence[Case]) -> list[PlanRow]:
        if self.seconds is not None:
            return self._predict(cases, self.seconds)
        begun = time.monotonic()
        rows = self._predict(cases, PREDICTING_SECONDS)
        self.seconds = max(SECONDS, SLOWER * (time.monotonic() - begun))
        return rows


class Step(NamedTuple):
    """A combination on the way, and what each strategy can save on top of it at the most, in bytes."""

    chosen: Combination
    can_save: Mapping[str, float]


def search(
    baseline: Case,
    members: Sequence[Applied],
    plugins: Plugins,
    predict: Callable[[Sequence[Case]], list[PlanRow]],
    on_step: Callable[[PlanRow], None] = lambda row: None,
    ranks: int = 1,
) -> list[PlanRow]:
    """Return what is predicted on the way to a combination that fits, the baseline first.

    Each strategy is tried alone. Then the one that saves most is added, again and again, of those whose answers are as
    the baseline's; where nothing of these fits, of those that reorder sums as well, and so on to the approximate ones.
    Of a combination that fits, what it fits without is taken out again. On several `ranks` it begins with each strategy
    that divides the run, the leanest first. Where no limit is known, or the baseline cannot be predicted, nothing is
    looked for. `on_step` gets each combination that something was added to.
    """
    tree = _Tree(baseline, members, plugins, predict, on_step, ranks)
    tree.predict([()])
    plain = tree.row(())
    if plain.limit_bytes is None or plain.peak_bytes is None:
        return [plain]
    starts: list[Combination] = [()]
    if ranks > 1:
        starts = [(each,) for each in members if divides(each, plugins) and ordered((each,), plugins) is not None]
    tree.predict(starts)
    if ranks == 1 and plain.seconds is not None:  # where times are known, another may be faster
        tree.alone(())
    kinds = {str(each): DECLARED.index(plugins.strategies[each.name].declares) for each in members}
    for kind in range(len(DECLARED)):
        allowed = {name for name, of in kinds.items() if of <= kind}
        if any(tree.is_solved(key) for key in tree.rows if key <= allowed):
            break
        known = [each for each in starts if _key(each) <= allowed and tree.row(each).peak_bytes is not None]
        for start in sorted(known, key=lambda each: taken(tree.row(each))):
            can_save = {name: saved for name, saved in tree.alone(start).items() if name in allowed}
            if chosen := tree.fitting(start, can_save):
                while chosen:
                    chosen = tree.shorter(chosen)
                break
    predicted = [row for row in tree.rows.values() if row.peak_bytes is not None]
    by_now = predict([row.case for row in predicted])  # by now the operators of all are timed
    again = dict(zip((_key(row.case.strategies) for row in predicted), by_now, strict=True))
    return [again.get(key, row) for key, row in tree.rows.items()]


class _Tree:
    """The combinations of some strategies, as far as they are predicted."""

    def __init__(
        self,
        baseline: Case,
        members: Sequence[Applied],
        plugins: Plugins,
        predict: Callable[[Sequence[Case]], list[PlanRow]],
        on_step: Callable[[PlanRow], None],
        ranks: int,
    ) -> None:
        self.rows: dict[frozenset[str], PlanRow] = {}
        self._seen: set[frozenset[str]] = set()
        self._baseline, self._members, self._plugins = baseline, members, plugins
        self._predict, self._on_step, self._ranks = predict, on_step, ranks
        self._alone: dict[frozenset[str], dict[str, float]] = {}

    def row(self, combination: Combination) -> PlanRow:
        """Return what is predicted of a combination."""
        return self.rows[_key(combination)]

    def predict(self, wanted: Sequence[Combination]) -> None:
        """Predict combinations, those beside each other that are not yet."""
        open_ = {_key(each): each for each in wanted if _key(each) not in self.rows}
        cases = [case_of(self._baseline, each, self._plugins, self._ranks) for each in open_.values()]
        self.rows.update(zip(open_, self._predict(cases) if cases else (), strict=True))

    def is_solved(self, key: frozenset[str]) -> bool:
        """Check whether a combination fits, and on several ranks divides the run."""
        row = self.rows[key]
        return bool(row.fits) and (self._ranks == 1 or row.case.ranks > 1)

    def alone(self, start: Combination) -> Mapping[str, float]:
        """Predict each other strategy on top of a combination; return what it can save there at the most, in bytes."""
        key = _key(start)
        if key not in self._alone:
            longer = {str(each): row for each in self._members if (row := self._with(start, each)) is not None}
            self.predict(list(longer.values()))
            self._alone[key] = {name: _most_saved(self.row(row), self.row(start)) for name, row in longer.items()}
        return self._alone[key]

    def fitting(self, start: Combination, can_save: Mapping[str, float]) -> Combination | None:
        """Return a combination that fits, of one and strategies that can save something; None where there is none.

        Where the first way ends near the limit, others branch off from it, each without what was added there.
        """
        way = self._way(Step(start, can_save))
        end = self.row(way[-1].chosen)
        if end.fits:
            return way[-1].chosen
        if taken(end) > SHORT * (end.limit_bytes or 0):
            return None
        for before, after in zip(way[-2::-1], way[:0:-1], strict=True):
            (added,) = _key(after.chosen) - _key(before.chosen)
            *_, last = self._way(Step(before.chosen, {**before.can_save, added: 0}))
            if self.row(last.chosen).fits:
                return last.chosen
        return None

    def _way(self, step: Step) -> list[Step]:
        """Add the strategy that saves most, again and again, until it fits or none saves anything; return each step."""
        way = [step]
        can_save = dict(step.can_save)
        while not self.row(way[-1].chosen).fits:
            if (chosen := self._longer(way[-1].chosen, can_save)) is None:
                break
            if _key(chosen) not in self._seen:  # answers less exact begin the same way
                self._on_step(self.row(chosen))
            self._seen.add(_key(chosen))
            way.append(Step(chosen, dict(can_save)))
        return way

    def _longer(self, chosen: Combination, can_save: dict[str, float]) -> Combination | None:
        """Return a combination with the strategy that saves most; None where none saves anything to speak of."""
        useful = [each for each in self._members if can_save.get(str(each))]
        added = {str(each): row for each in useful if (row := self._with(chosen, each)) is not None}
        open_ = sorted(added, key=lambda name: -can_save[name])
        best, most = None, LEAST * taken(self.row(chosen))
        while open_ and can_save[open_[0]] > most:
            tried, open_ = open_[:AT_ONCE], open_[AT_ONCE:]
            self.predict([added[name] for name in tried])
            for name in tried:
                can_save[name] = taken(self.row(chosen)) - taken(self.row(added[name]))
                if can_save[name] > most:
                    best, most = added[name], can_save[name]
        return best

    def _with(self, chosen: Combination, each: Applied) -> Combination | None:
        """Return a combination with another strategy, None where it does not go with these, or is one of them."""
        together = sorted((*chosen, each), key=self._members.index)
        return None if each in chosen else ordered(together, self._plugins)

    def shorter(self, chosen: Combination) -> Combination | None:
        """Return a combination that fits with a strategy less; None where each of them is needed."""
        all_rests = (chosen[:at] + chosen[at + 1 :] for at in range(len(chosen)))
        rests = [rest for rest in all_rests if self._ranks == 1 or any(divides(each, self._plugins) for each in rest)]
        self.predict(rests)
        fitting = (each for each in rests if self.row(each).fits)
        return min(fitting, key=lambda each: taken(self.row(each)), default=None)


def _key(combination: Sequence[Applied]) -> frozenset[str]:
    return frozenset(map(str, combination))


def _most_saved(row: PlanRow, plain: PlanRow) -> int:
    """Return by how much a strategy alone makes the peak of a phase less, at the most, in bytes."""
    peaks = {phase.name: phase.peak_bytes for phase in row.prediction.predicted_phases}
    saved = (phase.peak_bytes - peaks.get(phase.name, phase.peak_bytes) for phase in plain.prediction.predicted_phases)
    return max((0, *saved)) if row.peak_bytes is not None else 0
