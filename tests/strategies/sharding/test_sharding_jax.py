"""Runs on several devices in JAX train as one device does, and each holds the part that it should.

How many devices a process has is fixed when JAX is imported, and the tests' own process has one. So the tests ask this
file, as a program, for what they want to know.
"""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from harness.records import Memory, Phase

EXACT, LOWER = 1e-5, 2e-2
QUICK = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):  # later ones end a process that names this flag
    QUICK += " --xla_cpu_use_fusion_emitters=false"
"""Programs that run a few times are compiled three times as fast without these."""
ALONE = (
    "ddp",
    "zero1",
    "fsdp",
    "tensor_parallel",
    "megatron_sequence_parallel",
    "ulysses",
    "ring_attention",
    "vocabulary_parallel_loss",
)
TOGETHER = {
    2: (
        "fsdp + checkpoint + fused_loss",
        "checkpoint + fused_loss + fsdp",
        "fsdp + bfloat16",
        "vocabulary_parallel_loss + ring_attention + fsdp",
        "zero1 + ulysses",
        "ring_attention without zigzag",
        "lora + ddp",
        "zero1 + lora",
        "lora + fsdp + checkpoint",
        "fsdp + lora",
        "lora + ulysses",
        "qlora + fsdp",
        "zero1 + qlora + checkpoint",
        "zero1 + vocabulary_parallel_loss",
        "zero1 + megatron_sequence_parallel",
    ),
    4: (
        "bfloat16 + fsdp",
        "fsdp + ulysses + vocabulary_parallel_loss",
        "tensor_parallel + vocabulary_parallel_loss + checkpoint",
        "ring_attention + fsdp + checkpoint",
        "accumulate + fsdp",
        "ring_attention without zigzag",
    ),
}
GROUPED = {"kv_heads": 2, "bias": True, "label_smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 5.0}
"""Fewer heads of keys than ranks, zeros among the parameters, and all terms of the loss."""
TIED = {"tied": True, "norm": "layer", "parallel": True, "positions": "learned"}
ONE_ROW = {"batch": 1, "ignored": 0.8}
"""All ranks but one have no target, and of the one that has some there is no room for as many as there are tokens."""
REFUSED = (
    ("fsdp + megatron_sequence_parallel", 4, 4, "megatron_sequence_parallel parts what another strategy has parted"),
    ("megatron_sequence_parallel + fsdp", 4, 4, "fsdp parts what another strategy has parted already: leave out one"),
    ("fsdp + tensor_parallel", 4, 4, "tensor_parallel parts what another strategy has parted already: leave out one"),
    ("megatron_sequence_parallel", 6, 6, "megatron_sequence_parallel gives each of 4 ranks as many of 6 heads: take a"),
    ("tensor_parallel", 12, 3, "tensor_parallel cannot share 3 heads for keys and values among 4 ranks: take a"),
)
"""Strategies that do not go together, or not with so many heads, of queries and of keys, on 4 devices; and why."""
SKIPPED = ("", 1), (" + ddp", 2)
"""What is added to a scaled loss, and the number of devices."""
CLASSIFIERS = "vocabulary_parallel_loss", "zero1 + vocabulary_parallel_loss", "vocabulary_parallel_loss + zero1"
"""Rows in which each of two devices is to have a half of the classifier."""


def asked(question: str, *arguments: object) -> dict:
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, question, *map(json.dumps, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_strategy_and_their_compositions_train_as_one_device_does(ranks):
    figures = asked("answers", ranks, [*ALONE, *TOGETHER[ranks]])
    bound = {name: LOWER if "bfloat16" in name else EXACT for name in figures}
    assert len(figures) == len(ALONE) + len(TOGETHER[ranks])
    assert not {name: off for name, off in figures.items() if not off < bound[name]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (GROUPED, ("tensor_parallel", "ulysses + vocabulary_parallel_loss", "ring_attention")),
        (TIED, ("fsdp + vocabulary_parallel_loss", "zero1", "megatron_sequence_parallel", "ring_attention + fsdp")),
        (ONE_ROW, ("ddp + drop_ignored",)),
    ],
    ids=["grouped", "tied", "one row"],
)
def test_other_models_too(shape, names):
    figures = asked("answers", 4, names, shape)
    assert len(figures) == len(names)
    assert not {name: off for name, off in figures.items() if not off < EXACT}


@pytest.mark.long
def test_wrong_ones_are_caught():
    figures = asked("mutants", 2)
    assert figures.keys() == {"mean of means", "last token lost", "positions in order", "gradients not summed"}
    assert all(off > 10 * EXACT for off in figures.values()), figures


@pytest.fixture
def programs(once):
    """What one process says of compiled programs and their states."""
    return once("programs-of-ranks", lambda folder: asked("programs"))


@pytest.mark.long
def test_each_device_holds_its_part(programs):
    figures = programs["bytes"]
    state = figures["state"]  # of parameters, gradients and moments
    assert figures["fsdp on 2"] <= 0.55 * state
    assert figures["fsdp on 4"] <= 0.30 * state
    assert figures["ddp on 2"] <= 1.06 * state
    assert figures["zero1 on 4"] <= (1 + 1 + 3 / 4) / 4 * state
    assert figures["tensor_parallel on 2"] <= 0.6 * state
    for name in ("ulysses", "ring_attention"):
        assert figures[f"{name}, activations on 2"] <= 0.6 * figures["activations"], name
    assert figures["vocabulary_parallel_loss, logits on 2"] <= 0.75 * figures["logits"]


@pytest.mark.long
def test_parameters_are_gathered_within_the_layers_forward_and_backward(programs):
    figures = programs["gathers"]
    assert figures["fsdp"] == 2 and figures["ddp"] == 0


@pytest.mark.long
def test_a_state_stays_as_it_lies_and_is_compiled_for_once(programs):
    assert programs["steps"] == dict.fromkeys(("ddp", "fsdp", "zero1"), 1)


@pytest.mark.long
def test_a_classifier_that_is_divided_stays_so_beside_divided_moments(programs):
    assert programs["classifiers"] == dict.fromkeys(CLASSIFIERS, 0.5)


@pytest.mark.long
def test_what_does_not_go_together_is_refused_in_a_sentence(programs):
    for (*_, sentence), said in zip(REFUSED, programs["refusals"], strict=True):
        assert sentence in said


@pytest.mark.long
def test_a_step_that_a_loss_scale_skips_has_its_loss_on_ranks_as_well(programs):
    of_one, of_two = programs["skipped"]
    assert of_two == pytest.approx(of_one, rel=LOWER)


def test_ranks_share_what_their_process_holds():
    from harness.worker.ranks import shared

    phase = Phase(name="init", entry_bytes=0, peak_bytes=400, exit_bytes=300, anon_bytes=300)
    whole = Memory(peak_host_bytes=800, phases=(phase,), budget_bytes=250, within_budget=False, resident_bytes=300)
    share = shared(whole, 4)
    assert (share.peak_host_bytes, share.all_ranks_bytes, share.within_budget) == (200, 800, True)
    assert share.phases == (Phase(name="init", entry_bytes=0, peak_bytes=100, exit_bytes=75, anon_bytes=75),)
    assert share.resident_bytes == 75
    assert shared(whole, 1) is whole


@pytest.mark.long
def test_a_share_is_measured_as_predicted():
    from harness.records import Applied, Case, Task
    from harness.run import runner

    shape = {"layers": 8, "width": 256, "heads": 4, "vocabulary": 512, "batch": 4, "tokens": 32}
    case = Case(
        workload="decoder",
        shape=shape,
        place="jax/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=(Applied(name="fsdp"),),
        ranks=2,
    )
    forecast, measured = (
        runner.run(Task(kind=kind, cases=(case,), run_id=f"sharding-{kind}", parent=0, folder="", steps=3), 1, 120.0)[0]
        for kind in ("predict", "memory")
    )
    assert measured.status == "ok", measured.evidence
    peak, predicted = measured.memory.peak_host_bytes, forecast.prediction.predicted_peak_bytes
    assert "shared_process" in measured.flags and measured.memory.all_ranks_bytes // 2 == peak
    assert abs(peak - predicted) <= 0.1 * predicted


# The program


class Trial:
    """Runs of the decoder on so many of the devices."""

    def __init__(self) -> None:
        from harness import Place, backends
        from harness.contract import plugins

        self.plugins = plugins.load()
        self.backend = backends.load("jax")
        self.decoder = self.plugins.workloads["decoder"]
        self.place = Place("jax", "cpu")
        self.backend.start(self.place)

    def case(self, names: str, ranks: int, shape: dict):
        from harness.records import Applied, Case

        def applied(text: str) -> Applied:
            text, _, on = text.partition(" with ")
            name, _, off = text.partition(" without ")
            knobs = {**self.plugins.strategies[name].probe, **({off: False} if off else {}), **json.loads(on or "{}")}
            return Applied(name=name, knobs=knobs)

        return Case(
            workload="decoder",
            shape=shape,
            place="jax/cpu",
            corpus="drawn",
            tokenizer="none",
            strategies=tuple(map(applied, names.split(" + "))) if names else (),
            ranks=ranks,
        )

    def outcome(self, names: str, ranks: int, shape: dict) -> tuple[list[float], dict]:
        """Give the losses of four updates and the first gradients, at the probe's ragged sizes.

        The gradients are the first moments of the first update, which is a tenth of them.
        """
        from collections import Counter
        from itertools import islice

        from harness.contract.assembly import assemble, never_called
        from harness.contract.loop import training

        made, calls = self.decoder, Counter()
        self.backend.deterministic(self.place)
        case = self.case(names, ranks, made.probe(made.shape(**shape)).model_dump() | shape)
        parts, losses, grads = assemble(self.plugins, case, calls=calls), [], {}
        batch = self.backend.like(made.abstract_batch(parts.shape))
        step = self.backend.prepare(parts, batch, assemble(self.plugins, case))
        assert not (unordered := collectives_beside_loops(step.as_text())), unordered

        def first(outputs):
            if isinstance(outputs, tuple) and not grads:
                grads.update(self.backend.arrays(parts.gather_parameters(parts, outputs[0]["first"])))

        for loss, _ in islice(training(parts, step, finish=first), 4):
            losses.append(float(loss))
        assert never_called(calls) is None, never_called(calls)
        return losses, {name: grad for name, (grad, _) in grads.items()}

    def compiled(self, names: str, ranks: int, **shape: object):
        from harness.contract.assembly import assemble

        case = self.case(names, ranks, self.decoder.shape(**shape).model_dump())
        parts = assemble(self.plugins, case, draw=lambda inner: self.backend.abstract_draw)
        batch = self.backend.like(self.decoder.abstract_batch(parts.shape))
        return parts, self.backend.lowered(parts, batch, parts).compile()

    def held(self, names: str, ranks: int, **shape: object) -> int:
        """Give what one device holds, by the compiler's analysis."""
        analysis = self.compiled(names, ranks, **shape)[1].memory_analysis()
        return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


PASSES = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives_beside_loops(program: str) -> list[str]:
    """List pairs of a loop in which something passes and of what passes beside it, where neither needs the other.

    Devices would be free to take them in different orders, and to wait for each other.
    """
    blocks = {block.split()[0].lstrip("%"): block for block in re.split(r"\n\n", program) if " {" in block}
    blocks |= {block.split()[1].lstrip("%"): block for block in blocks.values() if block.startswith("ENTRY")}

    def passing(name: str) -> bool:
        inner = re.findall(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", blocks[name])
        return bool(PASSES.search(blocks[name])) or any(passing(each) for each in inner if each in blocks)

    pairs = []
    for block in blocks.values():
        needs: dict[str, set[str]] = {}
        loops, all_ = [], []
        for line in block.splitlines()[1:]:
            match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
            if not match:
                continue
            used = [each for each in re.findall(r"%([\w.\-]+)", line[match.end() :]) if each in needs]
            needs[match[1]] = set(used).union(*(needs[each] for each in used))
            body = re.search(r" while\(.*body=%?([\w.\-]+)", line)
            if body and passing(body[1]):
                loops.append(match[1])
            if PASSES.search(line) or (loops and loops[-1] == match[1]):
                all_.append(match[1])
        pairs += [
            f"{loop} beside {other}"
            for loop in loops
            for other in all_
            if loop != other and loop not in needs[other] and other not in needs[loop]
        ]
    return pairs


def apart(divided, plain) -> float:
    """Give the largest distance of losses and gradients, relative to the second."""
    import numpy as np

    (losses, grads), (due, known) = divided, plain
    assert grads.keys() == known.keys()
    off = [abs(a - b) / abs(b) for a, b in zip(losses, due, strict=True)]
    largest = max(float(np.linalg.norm(grad)) for grad in known.values())
    for name, grad in known.items():
        assert grads[name].shape == grad.shape, name
        size = max(float(np.linalg.norm(grad)), 1e-3 * largest)  # some are 0 but for rounding
        off.append(float(np.linalg.norm(grads[name] - grad)) / size)
    return max(off)


def answers(ranks: int, names: list[str], shape: dict | None = None) -> dict[str, float]:
    trial, shape = Trial(), shape or {}
    alone = {name: " + ".join({"lora", "qlora"} & set(name.split(" + "))) for name in names}
    plain = {name: trial.outcome(name, 1, shape) for name in {*alone.values()}}
    return {name: apart(trial.outcome(name, ranks, shape), plain[alone[name]]) for name in names}


def mutants(ranks: int) -> dict[str, float]:
    from strategies.sharding import _jax

    trial = Trial()
    plain = trial.outcome("", 1, {})
    figures = {}

    def tried(what: str, name: str, of: str, wrong: object) -> None:
        right = getattr(_jax, of)
        setattr(_jax, of, wrong)
        figures[what] = apart(trial.outcome(name, ranks, {}), plain)
        setattr(_jax, of, right)

    weighed, filled = _jax.weighed, _jax.filled

    def of_means(parts, x, y):
        return (*weighed(parts, x, y)[:2], 1 / parts.ranks)

    def without_last(values, size, axis, nothing=0):
        lost = values.at[..., -1].set(nothing) if nothing else values
        return filled(lost, size, axis, nothing)

    tried("mean of means", "ulysses", "weighed", of_means)
    tried("last token lost", "ulysses", "filled", without_last)
    tried("positions in order", "ring_attention", "positions_by", lambda blocks: lambda p, n: (slice(0, n * p.ranks),))
    tried("gradients not summed", "ulysses", "over_ranks", lambda parts, value: value)
    return figures


def bytes_of_one() -> dict[str, float]:
    trial, figures = Trial(), {}
    deep = {"layers": 12, "width": 256, "heads": 4, "vocabulary": 256, "batch": 4, "tokens": 4}
    figures["state"] = 16 * trial.decoder.parameters(trial.decoder.shape(**deep))
    for name in ("ddp on 2", "fsdp on 2", "fsdp on 4", "zero1 on 4", "tensor_parallel on 2"):
        names, _, ranks = name.partition(" on ")
        figures[name] = trial.held(names, int(ranks), **deep)
    long = {"layers": 4, "width": 128, "heads": 4, "vocabulary": 256, "batch": 1, "tokens": 512}
    own = 16 * trial.decoder.parameters(trial.decoder.shape(**long))
    figures["activations"] = trial.held("", 1, **long) - own
    for name in ("ulysses", "ring_attention"):
        figures[f"{name}, activations on 2"] = trial.held(name, 2, **long) - own
    wide = {"layers": 1, "width": 64, "heads": 4, "vocabulary": 16384, "batch": 1, "tokens": 256}
    figures["logits"] = trial.held("", 1, **wide)
    figures["vocabulary_parallel_loss, logits on 2"] = trial.held("vocabulary_parallel_loss", 2, **wide)
    return figures


def gathers() -> dict[str, int]:
    """Count the loops of the compiled program in which parameters are gathered."""
    trial, figures = Trial(), {}
    for name in ("ddp", "fsdp"):
        text = trial.compiled(name, 2, layers=4, width=64, heads=4, vocabulary=64, batch=2, tokens=8)[1].as_text()
        bodies = {body.lstrip("%") for body in re.findall(r"\bbody=(%?[\w.\-]+)", text)}
        blocks = re.split(r"\n(?=%?[\w.\-]+ \()", text)
        inside = [block for block in blocks if block.split(" ")[0].lstrip("%") in bodies]
        figures[name] = sum("all-gather" in block for block in inside)
    return figures


def steps() -> dict[str, int]:
    """Take steps compiled ahead of time; count the ways in which the arrays of the state lay."""
    import jax

    from harness.contract.assembly import assemble

    trial, counts = Trial(), {}
    for name in ("ddp", "fsdp", "zero1"):
        parts = assemble(trial.plugins, trial.case(name, 2, trial.decoder.probe(trial.decoder.shape()).model_dump()))
        abstract = assemble(trial.plugins, trial.case(name, 2, parts.shape.model_dump()))
        batch = trial.backend.like(trial.decoder.abstract_batch(parts.shape))
        step = trial.backend.prepare(parts, batch, abstract)
        source = parts.source(parts)
        state, ways = parts.init(parts, source), set()
        batches = parts.batches(parts, parts.windows(parts, source))
        for _ in range(3):
            before = state
            state, _ = step(state, *next(batches))
            assert all(old.is_deleted() for old in jax.tree.leaves(before["params"])), "it was not donated"
            ways.add(str(jax.tree.map(lambda leaf: leaf.sharding, state)))
        assert "ranks" in str(ways) or name == "ddp"
        counts[name] = len(ways)
    return counts


def classifiers() -> dict[str, float]:
    """Give which share of the classifier the first of two devices has."""
    from harness.contract.assembly import assemble

    trial, shares = Trial(), {}
    for names in CLASSIFIERS:
        parts = assemble(trial.plugins, trial.case(names, 2, trial.decoder.probe(trial.decoder.shape()).model_dump()))
        head = parts.init(parts, None)["params"]["head"]
        shares[names] = head.addressable_shards[0].data.size / head.size
    return shares


def skipped() -> list[list[float]]:
    """Give the losses of one device and of two where no step is taken, as its gradients overflow."""
    return [Trial().outcome(f'float16_scaled with {{"scale": 1e12}}{more}', ranks, {})[0] for more, ranks in SKIPPED]


def refusals() -> list[str]:
    """Give what is said of each combination when its step is traced."""
    trial, said = Trial(), []
    for names, heads, key_heads, _ in REFUSED:
        small = {"layers": 2, "width": 48, "vocabulary": 64, "batch": 4, "tokens": 8}
        try:
            trial.compiled(names, 4, **small, heads=heads, kv_heads=key_heads)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


def programs_of_ranks() -> dict[str, object]:
    return {
        "bytes": bytes_of_one(),
        "gathers": gathers(),
        "steps": steps(),
        "classifiers": classifiers(),
        "refusals": refusals(),
        "skipped": skipped(),
    }


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = QUICK
    questions = {"answers": answers, "mutants": mutants, "programs": programs_of_ranks}
    print(json.dumps(questions[sys.argv[1]](*map(json.loads, sys.argv[2:]))))
