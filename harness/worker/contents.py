"""What a measured run holds, by kind and by stage: read from the sizes of its arrays, which takes nothing itself."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from harness.contract import kinds
from harness.contract.parts import ABSENT, Parts
from harness.contract.stages import Profile


class Contents:
    """The kinds and numbers of one run and its `profile`, filled while it goes on."""

    def __init__(self, backend: Any, profile: Profile) -> None:
        self._backend, self.profile = backend, profile
        self.counts: dict[str, float] = {}
        self._kinds: dict[str, int] = {}
        self._fed: int | None = None  # what is in use when the first batch is there

    def watched(self, parts: Parts) -> Parts:
        """Watch the batches of a run; where its step is eager, its gradients and stages as well."""
        inner = parts.batches

        def batches(parts: Parts, windows: Any) -> Iterator[tuple[Any, Any]]:
            for x, y in inner(parts, windows):
                self._note({"batch": [each for each in (x, y) if hasattr(each, "nbytes")]})
                if self._fed is None and self._backend.EAGER:
                    self._fed = self.profile.in_use()
                yield x, y
                del x, y  # or the run would be charged for two batches

        parts = replace(parts, batches=batches)
        if not self._backend.EAGER:
            return parts
        return self.profile.of(self._with_gradients(parts))

    def _with_gradients(self, parts: Parts) -> Parts:
        inner = parts.update
        if inner is ABSENT:
            return parts

        def update(parts: Parts, state: Any, grads: Any) -> Any:
            if not self._backend.tracing():
                self._note({"gradients": kinds.arrays(grads)})
            return inner(parts, state, grads)

        return replace(parts, update=update)

    def finish(self, outputs: Any) -> None:
        """End `init` or a step: wait for its outputs, and note what its state keeps."""
        self._backend.wait(outputs)
        state = outputs[0] if isinstance(outputs, tuple) else outputs
        self._note(kinds.of_state(state))
        self.counts = kinds.counts(state)

    def _note(self, members: Mapping[str, list[Any]]) -> None:
        for kind, size in kinds.sizes(members).items():
            self._kinds[kind] = max(self._kinds.get(kind, 0), size)

    def by_kind(self, peaks: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of each kind: activations and logits by stages and `peaks` of phases of the first step."""
        known = dict(self._kinds)
        stages = self.profile.stages
        if {"parameters", "forward"} <= stages.keys():
            begun = stages["parameters"] + known.get("batch", 0)
            if self._fed is not None:  # rows that are read as they are needed are there by then
                begun = max(begun, self._fed)
            known["activations"] = max(0, stages["forward"] - begun)
            ends = [end for end in (peaks.get("first_step/loss"), stages.get("loss")) if end is not None]
            if ends:  # where the loss is called again, for pieces of a batch, its phase has their gradients as well
                known["logits"] = max(0, min(ends) - stages["forward"])
        return {kind: known[kind] for kind in kinds.KINDS if kind in known}
