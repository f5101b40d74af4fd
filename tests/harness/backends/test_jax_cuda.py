"""Steps of JAX that XLA compiles for GPUs which are not there."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import jax
import pytest

from harness import Place
from harness.backends import cards, jax_cuda
from harness.backends.cards import CARDS
from harness.contract import plugins
from harness.records import Applied, Case, Task
from harness.run import runner

LOADED = plugins.load()
SHAPE = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 8192, "tokens": 1024}
ON_A_GPU = [
    name
    for name, strategy in sorted(LOADED.strategies.items())
    if not strategy.ranks and strategy.obstacle(Place("jax", "cuda"), LOADED.workloads["decoder"]) is None
]

KNOBS = {"automatic_windows": {"available_gib": 1.0}}
"""What has to be said of a GPU that is not here."""
LACK = jax_cuda.lacking(jax.__version__)


def compiled(test):
    """Mark a test that compiles for a GPU, some ten seconds for each step; it says how to get the compiler."""
    return pytest.mark.slow(pytest.mark.skipif(LACK is not None, reason=LACK or "")(test))


def predict(names=(), place="jax/cuda", card="", ranks=1):
    case = Case(
        workload="decoder",
        shape=SHAPE,
        place=place,
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=KNOBS.get(name, {})) for name in names),
        ranks=ranks,
    )
    variables = {cards.VARIABLE: card} if card else {}
    task = Task(kind="predict", cases=(case,), run_id="targets", parent=os.getpid(), folder="", environment=variables)
    (record,) = runner.run(task, 1, 120.0)
    assert record.status == "ok", record.evidence
    return record


@cache
def peak(*names, place="jax/cuda", card=""):
    record = predict(names, place, card)
    assert record.prediction.predicted_peak_bytes is not None, record.missing
    return record.prediction.predicted_peak_bytes


@compiled
def test_a_gpu_takes_attention_that_keeps_no_scores_where_the_cpu_keeps_all():
    assert peak("bfloat16") < 0.5 * peak()
    assert peak("checkpoint", "fused_loss", "bfloat16") < 0.5 * peak("bfloat16")
    scores = 4 * SHAPE["heads"] * SHAPE["tokens"] ** 2
    assert peak("bfloat16", place="jax/cpu") - peak("bfloat16") > scores


@pytest.mark.skipif(LACK is not None, reason=LACK or "")
def test_what_lies_on_the_host_counts_apart():
    away, near = predict(["offloaded_moments"]), predict()
    parameters = near.prediction.parameters
    assert away.prediction.predicted_host_bytes == pytest.approx(8 * parameters, rel=0.02)
    assert near.prediction.predicted_host_bytes == 0
    assert near.prediction.predicted_peak_bytes - away.prediction.predicted_peak_bytes > 4 * parameters


@compiled
def test_the_card_is_the_one_that_is_named_and_said():
    assert "H100" in predict().notes["gpu"]
    assert "NVIDIA L4" in predict(card="NVIDIA L4").notes["gpu"]


@compiled
@pytest.mark.parametrize("card", [name for name, card in CARDS.items() if card.capability >= (7, 5)])
def test_a_step_compiles_for_every_card(card):
    assert 0.5 * peak("bfloat16") < peak("bfloat16", card=card) < 2 * peak("bfloat16")


@compiled
@pytest.mark.parametrize("name", ON_A_GPU)
def test_every_strategy_compiles_for_a_gpu(name):
    assert peak(name) > 0


@pytest.mark.parametrize("card", ["v100", "v100-32gb"])
def test_a_card_that_cuda_left_behind_is_refused_in_a_sentence(card):
    reason = predict(["bfloat16"], card=card).missing["predicted_peak_bytes"]
    assert reason.startswith("JAX is built for CUDA 13, which begins with compute capability 7.5, and Tesla V100")
    assert reason.endswith("has 7.0: take torch, or another card")


def test_several_gpus_are_not_predicted_and_the_row_says_so():
    record = predict(["fsdp"], ranks=2)
    assert record.prediction.predicted_peak_bytes is None
    assert "one GPU" in record.missing["predicted_peak_bytes"]


def test_without_the_compiler_the_row_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(jax_cuda, "version", absent)
    reason = jax_cuda.lacking("0.10.2")
    assert "pip install jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2 (the extra cuda-planning)" in reason
    with pytest.raises(jax_cuda.Unavailable, match="needs no GPU and is not installed"):
        jax_cuda.device(CARDS["h100"])


@pytest.mark.skipif(LACK is not None, reason=LACK or "")
def test_only_a_compiler_that_does_not_load_makes_the_place_unavailable(monkeypatch):
    from jax.experimental import topologies

    def unloaded(**_):
        raise NotImplementedError("topology not implemented for cuda")

    with pytest.raises(jax.errors.JaxRuntimeError, match="parse"):
        monkeypatch.setattr(jax_cuda, "_CONFIG", "nonsense")
        jax_cuda.device(CARDS["h100"])
    monkeypatch.setattr(topologies, "get_topology_desc", unloaded)
    with pytest.raises(jax_cuda.Unavailable, match="does not load"):
        jax_cuda.device(CARDS["h100"])


def test_a_compiler_of_another_version_is_named(monkeypatch):
    monkeypatch.setattr(jax_cuda, "version", lambda name: "0.9.0")
    assert "of version 0.9.0 and JAX of 0.10.2: pip install" in jax_cuda.lacking("0.10.2")
    monkeypatch.setattr(jax_cuda, "version", lambda name: "0.10.2")
    assert jax_cuda.lacking("0.10.2") is None


def test_cudnn_is_that_of_this_machine_again_afterwards():
    from jax._src.cudnn import fused_attention_stablehlo as attention

    before = attention.check_cudnn_version
    with jax_cuda.supposed(CARDS["a100"]):
        assert attention.check_cudnn_version() == jax_cuda.CUDNN
        assert attention.check_compute_capability("8.0") and not attention.check_compute_capability("9.0")
    assert attention.check_cudnn_version is before


class Lowered:
    """A step that compiles to programs of these sizes, one for each way, or fails with these words."""

    def __init__(self, *sizes, fails=""):
        self.sizes, self.fails, self.ways = list(sizes), fails, []

    def compile(self, way=None):
        if self.fails:
            raise jax.errors.JaxRuntimeError(self.fails)
        self.ways.append(way)
        size = self.sizes[len(self.ways) - 1]
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=size))


def test_from_jax_0_11_on_the_larger_of_two_programs_counts(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    for sizes in ((10, 20), (20, 10)):
        lowered = Lowered(*sizes)
        assert jax_cuda.compiled(lowered).memory_analysis().temp_size_in_bytes == 20
        assert lowered.ways == list(jax_cuda.WAYS)
    with pytest.raises(jax_cuda.Unavailable, match="pip install nvidia-cuda-nvcc nvidia-nvvm"):
        jax_cuda.compiled(Lowered(fails="No PTX compilation provider is available"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="another"):
        jax_cuda.compiled(Lowered(fails="another"))
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    before = Lowered(10, 20)
    jax_cuda.compiled(before)
    assert before.ways == [None]
