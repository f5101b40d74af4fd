"""Look for a combination of strategies that fits, where there are too many to predict them all.

Greedily, and lazily: what a strategy saves on top of others is mostly less than what it saves alone (Minoux,
"Accelerated greedy algorithms for maximizing submodular set functions", 1978). So those that can save more than the
best of this step are predicted in it, and no others.
"""

from collections.abc import Callable, Sequence

from harness.contract.plugins import Plugins
from harness.contract.strategy import DECLARED
from harness.records import Applied, Case
from harness.verbs.combinations import ordered
from harness.verbs.plan import PlanRow, taken

AT_ONCE = 6
"""Combinations that are predicted beside each other before it is seen whether one of them saves most."""
LEAST = 0.005
"""The share of what a combination takes that a strategy must save to be added to it."""
SECONDS = 10.0
"""How long a combination may take to be predicted: those that take longer are left out."""
Combination = tuple[Applied, ...]


def search(
    baseline: Case, members: Sequence[Applied], plugins: Plugins, predict: Callable[[Sequence[Case]], list[PlanRow]]
) -> list[PlanRow]:
    """Return what is predicted on the way to a combination that fits, the baseline first.

    Each strategy is tried alone. Then the one that saves most is added, again and again, of those whose answers are as
    the baseline's; where nothing of these fits, of those that reorder sums as well, and so on to the approximate ones.
    Of a combination that fits, what it fits without is taken out again. Where no limit is known nothing is looked for.
    """
    rows: dict[frozenset[str], PlanRow] = {}

    def known(combination: Sequence[Applied]) -> PlanRow:
        return rows[_key(combination)]

    def predict_all(wanted: Sequence[Combination]) -> None:
        open_ = {_key(each): each for each in wanted if _key(each) not in rows}
        cases = [baseline.model_copy(update={"strategies": each}) for each in open_.values()]
        rows.update(zip(open_, predict(cases) if cases else (), strict=True))

    def together(chosen: Combination, each: Applied) -> Combination | None:
        return None if each in chosen else ordered(sorted((*chosen, each), key=members.index), plugins)

    def longer(chosen: Combination, can_save: dict[str, float]) -> Combination | None:
        """Return a combination with the strategy that saves most; None where none saves anything to speak of."""
        added = {str(each): row for each in members if (row := together(chosen, each)) and can_save.get(str(each))}
        open_ = sorted(added, key=lambda name: -can_save[name])
        best, most = None, LEAST * taken(known(chosen))
        while open_ and can_save[open_[0]] > most:
            tried, open_ = open_[:AT_ONCE], open_[AT_ONCE:]
            predict_all([added[name] for name in tried])
            for name in tried:
                can_save[name] = taken(known(chosen)) - taken(known(added[name]))
                if can_save[name] > most:
                    best, most = added[name], can_save[name]
        return best

    def shorter(chosen: Combination) -> Combination | None:
        """Return a combination that fits with a strategy less; None where each of them is needed."""
        rests = [chosen[:at] + chosen[at + 1 :] for at in range(len(chosen))]
        predict_all(rests)
        return min((each for each in rests if known(each).fits), key=lambda each: taken(known(each)), default=None)

    predict_all([()])
    plain = known(())
    if plain.limit_bytes is None:
        return [plain]
    if not plain.fits or plain.seconds is not None:  # where times are known, another may be faster
        predict_all([(each,) for each in members if ordered((each,), plugins) is not None])
    alone = {str(each): _most_saved(known((each,)), plain) for each in members if _key((each,)) in rows}
    kinds = {str(each): DECLARED.index(plugins.strategies[each.name].declares) for each in members}
    for kind in range(len(DECLARED)):
        if any(row.fits and all(kinds[name] <= kind for name in key) for key, row in rows.items()):
            break
        chosen: Combination | None = ()
        can_save: dict[str, float] = {name: saved for name, saved in alone.items() if kinds[name] <= kind}
        while chosen is not None and not known(chosen).fits:
            chosen = longer(chosen, can_save)
        while chosen:
            chosen = shorter(chosen)
    predicted = [row for row in rows.values() if row.peak_bytes is not None]
    by_now = predict([row.case for row in predicted])  # by now the operators of all are timed
    again = dict(zip((_key(row.case.strategies) for row in predicted), by_now, strict=True))
    return [again.get(key, row) for key, row in rows.items()]


def _key(combination: Sequence[Applied]) -> frozenset[str]:
    return frozenset(map(str, combination))


def _most_saved(row: PlanRow, plain: PlanRow) -> int:
    """Return by how much a strategy alone makes the peak of a phase less, at the most, in bytes."""
    peaks = {phase.name: phase.peak_bytes for phase in row.prediction.predicted_phases}
    saved = (phase.peak_bytes - peaks.get(phase.name, phase.peak_bytes) for phase in plain.prediction.predicted_phases)
    return max((0, *saved)) if row.peak_bytes is not None else 0
